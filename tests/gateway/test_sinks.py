"""Sinks on both databases, before real receivers that fail, stall, repeat and break off: each event once, by its id."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.ledger import Entry
from gateway.ledger.follow import Follower, Overtaken
from gateway.sinks.book import count_failures
from gateway.sinks.config import SinkInvalid, kind_of, url_of
from gateway.sinks.delivery import follower_of
from gateway.sinks.events import events_of, id_of
from gateway.store import Store
from policies import settings
from policies.configuration import SettingsError, load
from tests.builders import PATIENCE_S, an_entry, write_chain
from tests.gateway.receivers import KEY, RECEIVERS, receiving
from tests.gateway.sink_bench import METERS, NOW, Bench, a_sink, add_tenants, benches, opened, some_entries


@pytest.fixture
async def rooms(store_settings) -> AsyncIterator[Store]:
    async with opened(store_settings) as rooms:
        yield rooms


@pytest.fixture
async def open_bench(rooms) -> AsyncIterator[Any]:
    async with benches(rooms) as open_it:
        yield open_it


@pytest.mark.parametrize("kind", RECEIVERS)
async def test_every_row_is_told_once_and_what_comes_later_too(open_bench, kind):
    bench = await open_bench(kind)
    first = await bench.write(*some_entries(130))
    second = await bench.write(*some_entries(20), chain=2)
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*first, *second)
    status = await bench.status()
    assert (status.state, status.num_rows, status.num_events) == ("current", 150, len(bench.receiver.counted))
    assert [(one.chain, one.position) for one in status.positions] == [(1, 130), (2, 20)]
    third = await bench.write(*some_entries(3))
    assert (await bench.status()).num_rows_behind == 3
    assert (await bench.status()).num_seconds_behind == 60
    await bench.restart().deliver()
    assert bench.values() == bench.expected(*first, *second, *third)
    assert not bench.receiver.num_repeats


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", RECEIVERS)
async def test_whatever_fails_nothing_is_lost_and_nothing_counts_twice(open_bench, kind, seed):
    chance = random.Random(seed)
    bench = await open_bench(kind, timeout_s=0.1)
    troubles = [500, 503, 401, (429, {"retry-after": "7"}), "close", "close after", "close after", "stall", 200, 200]
    written: list[Entry] = []
    for _ in range(8):
        written += await bench.write(*some_entries(chance.randrange(1, 12), chance), chain=chance.randrange(1, 4))
        bench.receiver.script = [chance.choice(troubles) for _ in range(chance.randrange(6))]
        delivering = asyncio.create_task(bench.delivery.deliver())
        if chance.random() < 0.3:  # the gateway dies
            for _ in range(chance.randrange(200)):
                await asyncio.sleep(0)
            delivering.cancel()
            bench.restart()
        await asyncio.wait([delivering])
        bench.wall.at += chance.choice([0, 2, 10, 400])
    bench.receiver.script = []
    bench.wall.at += 400
    bench.sink = msgspec.structs.replace(bench.sink, timeout_s=PATIENCE_S)
    await bench.restart().deliver()
    assert bench.values() == bench.expected(*written), f"seed {seed}"
    status = await bench.status()
    assert (status.state, status.num_rows, status.num_failures) == ("current", len(written), 0)


async def test_what_stands_behind_a_row_that_has_not_come_waits_and_the_status_says_so(open_bench):
    bench = await open_bench("lago")
    rows = [an_entry(settled_at=NOW) for _ in range(3)]
    await write_chain(bench.rooms, rows[0])
    await write_chain(bench.rooms, rows[2], first_position=3)
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(rows[0])
    status = await bench.status()
    assert (status.state, status.num_rows_behind, status.num_gaps) == ("behind", 2, 1)
    await write_chain(bench.rooms, rows[1], first_position=2)
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(*rows)
    assert (await bench.status()).num_gaps == 0


async def test_rows_of_a_chain_come_in_order(open_bench):
    bench = await open_bench("webhook")
    rows = await bench.write(*some_entries(30))
    bench.receiver.script = [200, 200, 500]
    await bench.delivery.deliver()
    bench.wall.at += 10
    await bench.delivery.deliver()
    assert bench.receiver.order == [id_of(row, "row") for row in rows]
    assert not bench.receiver.num_repeats  # the cursor was moved past the two that were taken


async def test_rows_of_a_tenant_that_is_nobody_there_are_passed_over_counted_and_named_once(open_bench, caplog):
    bench = await open_bench("stripe", customer="metadata.stripe_customer_id")
    known = await bench.write(*some_entries(5))
    await bench.write(*(an_entry(tenant_id="ten_4", settled_at=NOW + number) for number in range(3)))
    await bench.write(an_entry(tenant_id="ten_unheard_of", settled_at=NOW))
    with caplog.at_level(logging.WARNING):
        await bench.delivery.deliver()
        await bench.write(an_entry(tenant_id="ten_4", settled_at=NOW + 9))
        await bench.delivery.deliver()
    assert bench.values() == bench.expected(*known)
    assert {customer for customer, _, _ in bench.receiver.counted.values()} <= {"cus_1", "cus_2", "cus_3"}
    status = await bench.status()
    assert (status.state, status.num_rows_skipped) == ("current", 5)
    assert [(one.tenant_id, one.num_rows, one.first_at, one.last_at) for one in status.skipped] == [
        ("ten_4", 4, NOW, NOW + 9),
        ("ten_unheard_of", 1, NOW, NOW),
    ]
    assert caplog.text.count("tenant ten_4 are passed over") == 1


async def test_what_was_before_the_first_day_is_not_sent(open_bench):
    bench = await open_bench("lago", since=datetime.date(2026, 11, 19))
    midnight = 1_795_046_400
    rows = await bench.write(an_entry(settled_at=midnight - 1), an_entry(settled_at=midnight))
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(rows[1])
    status = await bench.status()
    assert (status.num_rows, status.num_rows_skipped) == (2, 0)


async def test_stripe_is_not_sent_what_it_takes_no_more(open_bench):
    bench = await open_bench("stripe")
    old, new = await bench.write(an_entry(settled_at=NOW - 35 * 86_400), an_entry(settled_at=NOW - 34 * 86_400))
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(new)
    assert all("35 days" in error for error in (await bench.failures()).values())
    assert set(await bench.failures()) == set(bench.expected(old))


@pytest.mark.parametrize("kind", ["stripe", "cloudevents", "lago"])
async def test_a_correction_takes_back_what_it_corrects(open_bench, kind):
    bench = await open_bench(kind)
    row = an_entry(num_prompt_tokens=100, num_cached_tokens=30, num_completion_tokens=7, cost_micros=50, settled_at=NOW)
    correction = an_entry(
        request_id="corr_1",
        corrects=row.request_id,
        reason="the client was told otherwise",
        num_prompt_tokens=-100,
        num_cached_tokens=-30,
        num_completion_tokens=-7,
        cost_micros=-50,
        settled_at=NOW,
    )
    await bench.write(row, correction)
    await bench.delivery.deliver()
    sums: dict[str, int] = {}
    for _, name, value in bench.receiver.counted.values():
        sums[name] = sums.get(name, 0) + value
    assert sums == {"input": 0, "cached": 0, "output": 0, "spend": 0}
    assert len(bench.receiver.counted) == 8


async def test_a_webhook_is_told_the_whole_row(open_bench):
    bench = await open_bench("webhook", customer="metadata.stripe_customer_id")
    (row,) = await bench.write(an_entry(settled_at=NOW, cost_micros=1234, metadata='{"job":"7"}', end_user="ann"))
    await bench.delivery.deliver()
    ((event_id, told),) = bench.receiver.counted.items()
    assert event_id == f"{row.request_id}:row"
    assert (told["type"], told["timestamp"]) == ("usage.settled", "2026-11-18T11:15:00Z")
    data = told["data"]
    assert data["customer"] == "cus_1"
    assert data["cost"] == {"amount_micros": 1234, "currency": "USD"}
    assert (data["metadata"], data["end_user"], data["num_completion_tokens"]) == ({"job": "7"}, "ann", 34)


async def test_a_sink_that_another_gateway_delivers_is_left_to_it(open_bench, rooms):
    bench = await open_bench("webhook")
    await bench.write(*some_entries(3))
    async with Follower(rooms, follower_of("one")).alone() as is_alone:
        assert is_alone
        await bench.delivery.deliver()
        assert not bench.receiver.num_posts


async def test_two_gateways_over_one_postgresql_send_each_event_once_among_them(postgres, tmp_path):
    chance = random.Random(5)
    async with contextlib.AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving("lago"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        benches = []
        for name in ("a", "b"):
            told = settings.Store(data_dir=str(tmp_path / name), url=postgres)
            opened = await stack.enter_async_context(store.opened(told))
            benches.append(Bench(opened, session, "lago", receiver))
        async with benches[0].rooms.engine.begin() as connection:
            await add_tenants(connection)
        written: list[Entry] = []
        for _ in range(15):
            written += await benches[0].write(*some_entries(chance.randrange(1, 30), chance))
            receiver.script = [chance.choice([200, 500, "close after"])]
            await asyncio.gather(*(bench.delivery.deliver() for bench in benches))
            benches[0].wall.at = benches[1].wall.at = benches[0].wall.at + 3
        receiver.script = []
        for bench in benches:
            bench.wall.at += 400
        await asyncio.gather(*(bench.delivery.deliver() for bench in benches))
        assert benches[0].values() == benches[0].expected(*written)
        assert (await benches[1].status()).num_rows == len(written)


async def test_a_cursor_that_was_moved_meanwhile_moves_nothing_twice(open_bench, rooms, monkeypatch):
    """A lock that was lost with its connection: both send, the receiver knows the repetitions, one moves the cursor."""
    bench = await open_bench("cloudevents")
    rows = await bench.write(*some_entries(4))
    other = Bench(rooms, bench.session, "cloudevents", bench.receiver)

    @contextlib.asynccontextmanager
    async def always_alone(self):
        yield True

    monkeypatch.setattr(Follower, "alone", always_alone)
    outcomes = await asyncio.gather(bench.delivery.deliver(), other.delivery.deliver(), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, Overtaken | sa.exc.OperationalError) for outcome in outcomes)
    assert bench.values() == bench.expected(*rows)
    assert (await bench.status()).num_rows == 4


def test_ids_follow_from_the_row_and_have_their_bound():
    row = an_entry(request_id="req_1", cost_micros=3)
    sink = a_sink("lago")
    assert [event.id for event in events_of(row, "c", sink)] == [f"req_1:{measure}" for measure in METERS]
    assert events_of(row, "c", sink) == events_of(row, "c", sink)
    assert len(id_of(an_entry(request_id="r" * 200), "prompt")) <= 100


def test_what_failed_counts_as_nothing():
    nothing = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "num_completion_tokens": 0}
    failed = an_entry(status=503, finish_reason="error", engine_us=1000, **nothing)
    counting = a_sink("lago", meters={"completion": "c", "request": "r", "engine_us": "e"})
    assert events_of(failed, "north", counting) == []
    assert [event.entry for event in events_of(failed, "north", a_sink("webhook"))] == [failed]
    broken_off = msgspec.structs.replace(failed, num_prompt_tokens=5, num_completion_tokens=1)
    assert [event.value for event in events_of(broken_off, "north", counting)] == [1, 1, 1000]


def test_an_answer_from_the_exact_cache_counts_as_such():
    sink = a_sink("lago", meters={"prompt": "p", "completion": "c", "cache_hit": "h", "request": "r"})
    found = events_of(an_entry(cache="hit"), "c", sink)
    assert [(event.name, event.value) for event in found] == [("h", 46), ("r", 1)]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ('kind = "strip"', "kind"),
        ('kind = "stripe"\nmeters = {prompt = "x"}', "sinks.one.key_variable: is required for stripe"),
        ('kind = "stripe"\nkey_variable = "K"', "sinks.one.meters: is required"),
        ('kind = "webhook"\nkey_variable = "K"', "sinks.one.url: is required for webhook"),
        (
            'kind = "webhook"\nkey_variable = "K"\nurl = "http://h/"\nmeters = {prompt = "x"}',
            "sinks.one.meters: a webhook is sent the whole row",
        ),
        (
            'kind = "lago"\nkey_variable = "K"\nmeters = {promt = "x"}',
            "meters: expected one of 'cache_hit', 'cached_prompt', 'completion'",
        ),
        ('kind = "lago"\nkey_variable = "K"\nmeters = {prompt = "x"}\ncustomer = "name"', "sinks.one.customer"),
        (
            'kind = "lago"\nkeyvariable = "secret"',
            "unknown key sinks.one.keyvariable; did you mean sinks.one.key_variable?",
        ),
        (
            'kind = "lago"\nkey_variable = "K"\nmeters = {prompt = "x"}\n[sinks.two]\nkind = "lago"\n'
            'key_variable = "K"\nmeters = {prompt = "y"}',
            "sinks.two: sends prompt to where sinks.one does",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(lines, what):
    with pytest.raises(SettingsError) as caught:
        load(f"[sinks.one]\n{lines}", {})
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("others", "environ", "what"),
    [
        ({}, {}, "sinks.one.key_variable is KEY, which the environment does not have"),
        ({}, {"KEY": "two words"}, "is no key"),
        ({}, {"KEY": "a\nb: c"}, "is no key"),
        ({"url": "ftp://host/"}, {"KEY": KEY}, "sinks.one.url is no address"),
        ({"url": "https://user:pass@host/"}, {"KEY": KEY}, "has a user or a password in it"),
    ],
)
def test_secrets_and_addresses_that_cannot_be_used_are_named_without_telling_them(others, environ, what):
    sink = a_sink("lago", **others)

    def open_it() -> None:
        url_of("one", sink)
        kind_of("one", sink, environ, "USD")

    with pytest.raises(SinkInvalid) as caught:
        open_it()
    assert what in str(caught.value)
    assert not any(value in str(caught.value) for value in (*environ.values(), "pass@"))


async def test_a_count_of_failures_is_one_sink_s_own(open_bench, rooms):
    bench = await open_bench("webhook")
    await bench.write(an_entry(settled_at=NOW))
    bench.receiver.customers = set()
    await bench.delivery.deliver()
    async with rooms.engine.connect() as connection:
        assert await count_failures(connection, "one") == 1
        assert await count_failures(connection, "two") == 0
