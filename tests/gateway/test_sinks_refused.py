"""Receivers that refuse, fail and stall: what is sent again, what is kept aside, and that the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.sinks import delivery
from gateway.sinks.delivery import backoff_s
from gateway.sinks.sending import MAX_RETRY_AFTER_S, retry_after_s
from gateway.store import Store
from policies import settings
from tests.builders import PATIENCE_S, an_entry, until
from tests.gateway.receivers import KEY, RECEIVERS
from tests.gateway.sink_bench import NOW, benches, opened, some_entries


@pytest.fixture
async def rooms(store_settings) -> AsyncIterator[Store]:
    async with opened(store_settings) as rooms:
        yield rooms


@pytest.fixture
async def open_bench(rooms) -> AsyncIterator[Any]:
    async with benches(rooms) as open_it:
        yield open_it


@pytest.mark.parametrize("trouble", [401, 403, 404, 409, 429, 500, 302, "close", "stall"])
async def test_a_receiver_that_takes_nothing_is_asked_again_less_and_less_often(open_bench, trouble, caplog):
    bench = await open_bench("cloudevents", timeout_s=1.0 if trouble == "stall" else PATIENCE_S)
    (row,) = await bench.write(an_entry(settled_at=NOW))
    bench.receiver.script = [trouble] * 3
    for num_tries in (1, 2, 3):
        await bench.delivery.deliver()
        status = await bench.status()
        assert (status.state, status.num_tries, status.num_failures) == ("waiting", num_tries, 0)
        assert status.last_error
        assert status.retry_at == int(bench.wall.at + backoff_s(num_tries))
        bench.wall.at += backoff_s(num_tries) - 0.1
        assert bench.delivery.is_waiting
        await bench.restart().deliver()
        assert bench.receiver.num_posts == num_tries
        assert bench.delivery.is_waiting
        bench.wall.at += 0.1
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(row)
    assert (bench.delivery.is_waiting, bench.delivery.num_taken) == (False, len(bench.values()))
    assert (await bench.status()).state == "current"
    for secret in (KEY, "hidden"):
        assert secret not in caplog.text
        assert secret not in (status.last_error or "")


async def test_what_retry_after_asks_for_is_waited(open_bench):
    bench = await open_bench("lago")
    await bench.write(an_entry(settled_at=NOW))
    bench.receiver.script = [(429, {"retry-after": "90"})]
    await bench.delivery.deliver()
    assert (await bench.status()).retry_at == NOW + 90
    bench.wall.at += 89
    await bench.delivery.deliver()
    assert bench.receiver.num_posts == 1
    bench.wall.at += 1
    await bench.delivery.deliver()
    assert (await bench.status()).state == "current"


def test_retry_after_is_seconds_or_a_date_and_never_more_than_an_hour():
    assert retry_after_s("12", NOW) == 12
    assert retry_after_s("Fri, 06 Nov 2026 10:55:00 GMT", 1_793_962_440) == 60
    assert [retry_after_s(odd, NOW) for odd in ("", "soon", "-3", "nan", "1.5")] == [0.0] * 5
    assert retry_after_s("9" * 400, NOW) in (0.0, MAX_RETRY_AFTER_S)
    assert [backoff_s(number) for number in (1, 2, 5, 100)] == [1.0, 2.0, 16.0, 300.0]


@pytest.mark.parametrize("kind", RECEIVERS)
async def test_an_event_that_is_refused_for_good_is_kept_aside_and_the_others_go_on(open_bench, kind):
    bench = await open_bench(kind, customer="tenant_name")
    rows = await bench.write(*some_entries(40))
    bench.receiver.customers = {"name 1", "name 3"}
    await bench.delivery.deliver()
    good = [row for row in rows if row.tenant_id != "ten_2"]
    bad = [row for row in rows if row.tenant_id == "ten_2"]
    assert bench.values() == bench.expected(*good)
    assert set(await bench.failures()) == set(bench.expected(*bad))
    assert all("status 4" in error for error in (await bench.failures()).values())
    status = await bench.status()
    assert (status.state, status.num_failures) == ("current", len(bench.expected(*bad)))
    bench.receiver.customers = None
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*good)  # nobody asked
    await bench.ask_again()
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*rows)
    assert (await bench.status()).num_failures == 0
    assert not bench.receiver.num_repeats


async def test_what_is_refused_again_stays_and_a_receiver_that_is_away_leaves_it_due(open_bench):
    bench = await open_bench("stripe")
    (row,) = await bench.write(an_entry(settled_at=NOW))
    bench.receiver.customers = set()
    await bench.delivery.deliver()
    await bench.ask_again()
    await bench.delivery.deliver()
    assert set(await bench.failures()) == set(bench.expected(row))
    await bench.ask_again()
    bench.receiver.customers = None
    bench.receiver.script = [503] * 3
    await bench.delivery.deliver()
    assert (await bench.status()).state == "waiting"
    bench.wall.at += 1
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(row)
    assert await bench.failures() == {}


async def test_a_refused_event_that_makes_trouble_does_not_hold_up_the_others(open_bench):
    bench = await open_bench("webhook")
    (bad,) = await bench.write(an_entry(settled_at=NOW))
    bench.receiver.customers = set()
    await bench.delivery.deliver()
    bench.receiver.customers = None
    await bench.ask_again()
    rows = await bench.write(*some_entries(3))
    bench.receiver.script = [200, 200, 200, 500]
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*rows)
    bench.wall.at += 1
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(bad, *rows)


async def test_with_too_many_refused_no_more_are_sent_until_they_are_taken(open_bench, monkeypatch):
    monkeypatch.setattr(delivery, "MAX_FAILURES", 100)
    monkeypatch.setattr("gateway.sinks.status.MAX_FAILURES", 100)
    bench = await open_bench("webhook")
    rows = await bench.write(*some_entries(350))
    bench.receiver.customers = set()
    await bench.delivery.deliver()
    status = await bench.status()
    assert (status.state, status.num_failures, status.num_rows_behind) == ("full", 100, 250)
    bench.receiver.customers = None
    await bench.ask_again()
    await bench.delivery.deliver()
    assert (await bench.status()).num_failures == 0
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*rows)
    assert (await bench.status()).state == "current"


async def test_what_is_sent_again_holds_up_no_shutdown_though_the_database_says_nothing(fragile_postgres, tmp_path):
    config = settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres")
    async with opened(config) as rooms, benches(rooms) as open_bench:
        bench = await open_bench("webhook")
        bench.receiver.script = [400]
        await bench.write(*some_entries(1))
        await bench.delivery.deliver()
        assert len(await bench.failures()) == 1
        await bench.ask_again()
        bench.receiver.script = ["stall"]
        delivering = asyncio.create_task(bench.delivery.deliver())
        await until(lambda: bench.receiver.num_posts == 2)
        fragile_postgres.stall()
        delivering.cancel()
        over, _ = await asyncio.wait([delivering], timeout=PATIENCE_S)
        fragile_postgres.resume()
        await asyncio.wait([delivering])
        assert over
        await bench.restart().deliver()
        assert not await bench.failures()
