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
from gateway.clock import Clock
from gateway.ledger import Entry
from gateway.ledger.follow import Follower, Overtaken
from gateway.sinks import delivery
from gateway.sinks.book import count_failures
from gateway.sinks.config import SinkInvalid, kind_of, secrets_of, url_of
from gateway.sinks.delivery import Delivery, backoff_s, follower_of
from gateway.sinks.events import events_of, id_of
from gateway.sinks.sending import MAX_RETRY_AFTER_S, Sender, retry_after_s
from gateway.sinks.status import SinkStatus, status_of
from gateway.store import Store
from policies import settings
from policies.configuration import SettingsError, load
from policies.sinks import Sink
from tests.builders import an_entry, write_chain
from tests.gateway.receivers import KEY, RECEIVERS, SECRET, receiving

NOW = 1_795_000_500
METERS = {"prompt": "input", "cached_prompt": "cached", "completion": "output", "cost_micros": "spend"}


class Wall:
    """The time of day, moved by hand."""

    def __init__(self) -> None:
        self.at = float(NOW)

    def __call__(self) -> float:
        return self.at


class Bench:
    """One sink's delivery and its receiver; ``restart`` as a gateway does."""

    def __init__(self, rooms: Store, session: aiohttp.ClientSession, kind: str, receiver: Any, **others: Any) -> None:
        self.rooms = rooms
        self.session = session
        self.receiver: Any = receiver
        self.wall = Wall()
        receiver.now = self.wall
        self.sink = a_sink(kind, url=f"{receiver.url}?token=hidden", **others)
        self.delivery = self.restart()
        self._next: dict[int, int] = {}

    def restart(self) -> Delivery:
        kind, key = kind_of("one", self.sink, {"KEY": SECRET if self.sink.kind == "webhook" else KEY}, "USD")
        url = url_of("one", self.sink)
        secrets = secrets_of(key, url, self.sink)
        sender = Sender(kind, url, self.session, secrets, self.sink.timeout_s, self.wall)
        self.delivery = Delivery("one", self.sink, sender, self.rooms, Clock(), self.wall)
        return self.delivery

    async def write(self, *entries: Entry, chain: int = 1) -> list[Entry]:
        first = self._next.get(chain, 1)
        self._next[chain] = first + len(entries)
        return await write_chain(self.rooms, *entries, chain=chain, first_position=first)

    async def status(self) -> SinkStatus:
        async with self.rooms.engine.connect() as connection:
            return await status_of(connection, "one", self.sink, self.wall())

    async def failures(self) -> dict[str, str]:
        async with self.rooms.engine.connect() as connection:
            rows = await connection.execute(sa.select(store.sink_failures))
            return {row.event_id: row.error for row in rows}

    async def ask_again(self) -> None:
        """As the administration does."""
        async with self.rooms.engine.begin() as connection:
            await connection.execute(sa.update(store.sink_failures).values(is_due=True))
            await connection.execute(sa.update(store.sink_states).values(retry_at=0.0))

    def expected(self, *entries: Entry) -> dict[str, Any]:
        """What the receiver has to have been told in the end."""
        return {event.id: event.value for entry in entries for event in events_of(entry, entry.tenant_id, self.sink)}

    def values(self) -> dict[str, Any]:
        if self.sink.kind == "webhook":
            return dict.fromkeys(self.receiver.counted, 0)
        return {event_id: value for event_id, (_, _, value) in self.receiver.counted.items()}


def a_sink(kind: str, **others: Any) -> Sink:
    meters = {} if kind == "webhook" else METERS
    return Sink(**{"kind": kind, "key_variable": "KEY", "meters": meters, "timeout_s": 5.0, **others})


@pytest.fixture
async def rooms(store_settings) -> AsyncIterator[Store]:
    async with store.opened(store_settings) as rooms:
        async with rooms.engine.begin() as connection:
            await add_tenants(connection)
        yield rooms


async def add_tenants(connection: Any) -> None:
    """ten_1 to ten_4, of which ten_4 is nobody to Stripe."""
    await connection.execute(
        sa.insert(store.organizations).values(id="org_1", name="one", created_at=1, version=1, revision=1)
    )
    await connection.execute(sa.insert(store.policy_heads).values(name="p", current_version=0, revision=1))
    for number in range(1, 5):
        row = {"id": f"ten_{number}", "organization_id": "org_1", "name": f"name {number}", "policy": "p"}
        row |= {"created_at": 1, "version": 1, "revision": 1}
        metadata = {"stripe_customer_id": f"cus_{number}"} if number < 4 else {}
        await connection.execute(
            sa.insert(store.tenants).values(**row, metadata=msgspec.json.encode(metadata).decode())
        )


@pytest.fixture
async def open_bench(rooms) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def open_it(kind: str, **others: Any) -> Bench:
            return Bench(rooms, session, kind, await stack.enter_async_context(receiving(kind)), **others)

        yield open_it


def some_entries(number: int, chance: random.Random | None = None) -> list[Entry]:
    chance = chance or random.Random(number)
    return [
        an_entry(
            tenant_id=f"ten_{chance.randrange(1, 4)}",
            num_prompt_tokens=chance.randrange(10, 500),
            num_cached_tokens=chance.randrange(10),
            num_completion_tokens=chance.randrange(3),
            cost_micros=chance.randrange(1000),
            settled_at=NOW - 60,
            cache=chance.choice(["miss", "hit"]),
        )
        for _ in range(number)
    ]


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
    await bench.delivery.deliver()
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


@pytest.mark.parametrize("trouble", [401, 403, 404, 409, 429, 500, 302, "close", "stall"])
async def test_a_receiver_that_takes_nothing_is_asked_again_less_and_less_often(open_bench, trouble, caplog):
    bench = await open_bench("cloudevents", timeout_s=0.05)
    (row,) = await bench.write(an_entry(settled_at=NOW))
    bench.receiver.script = [trouble] * 3
    for num_tries in (1, 2, 3):
        await bench.delivery.deliver()
        status = await bench.status()
        assert (status.state, status.num_tries, status.num_failures) == ("waiting", num_tries, 0)
        assert status.last_error
        assert status.retry_at == int(bench.wall.at + backoff_s(num_tries))
        bench.wall.at += backoff_s(num_tries) - 0.1
        await bench.restart().deliver()
        assert bench.receiver.num_posts == num_tries
        bench.wall.at += 0.1
    await bench.delivery.deliver()
    assert bench.values() == bench.expected(row)
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
        ('kind = "lago"\nkey_variable = "K"\nmeters = {promt = "x"}', "promt"),
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
