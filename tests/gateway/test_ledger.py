"""The ledger on both databases: durable before settle returns, once, in shared commits, whatever goes wrong between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
import sqlalchemy as sa

from gateway import errors, store
from gateway.clock import Clock
from gateway.ledger import FIRST_RETRY_S, Chain, Entry, Ledger, WriteError, Writer, open_chain, writer_for
from gateway.ledger.chains import GENESIS, content_of, link_of
from gateway.ledger.writers import SqliteWriter
from gateway.store import Store
from policies import settings
from tests.builders import PATIENCE_S, HandClock, an_entry, until


@contextlib.asynccontextmanager
async def ledger_of(
    writer: Writer, clock: Clock | None = None, num_open: int = 1, chain: Chain | None = None, **limits: object
) -> AsyncIterator[Ledger]:
    ledger = Ledger(writer, settings.Store(**limits), clock or Clock(), chain or Chain(1), lambda: num_open)
    yield ledger
    await ledger.close(PATIENCE_S)


async def rows(rooms: Store) -> list[Entry]:
    """What somebody else sees who opens the database now."""
    async with rooms.engine.connect() as connection:
        return [Entry(*row) for row in await connection.execute(sa.select(store.ledger).order_by("request_id"))]


def settled(entries: Sequence[Entry]) -> list[Entry]:
    """In the order of their ids, without the place that the ledger gave them."""
    out = [msgspec.structs.replace(entry, settled_at=0, chain=0, position=0, link=None) for entry in entries]
    return sorted(out, key=lambda entry: entry.request_id)


async def check_chain(rooms: Store, num_places: int, number: int = 1) -> None:
    """What is there is one chain of so many places, and each link is over the one before and the row."""
    contents = {entry.position: (content_of(entry), entry.link) for entry in await rows(rooms)}
    async with rooms.engine.connect() as connection:
        for repeat in await connection.execute(sa.select(store.ledger_repeats)):
            assert repeat.position not in contents
            contents[repeat.position] = (repeat.content, None)
    assert sorted(contents) == list(range(1, num_places + 1))
    link = GENESIS
    for position, (content, kept) in sorted(contents.items()):
        link = link_of(link, content)
        assert kept in (link, None), position
    assert {entry.chain for entry in await rows(rooms)} <= {number}


class Counting:
    """A real writer, and how many rows each of its commits had."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.sizes: list[int] = []

    async def write(self, entries: Sequence[Entry]) -> None:
        self.sizes.append(len(entries))
        await self._writer.write(entries)

    async def close(self) -> None:
        await self._writer.close()


class Failing(Counting):
    """A real writer behind a database that is away at times, also just after a commit."""

    def __init__(self, writer: Writer, chance: random.Random) -> None:
        super().__init__(writer)
        self._chance = chance

    async def write(self, entries: Sequence[Entry]) -> None:
        if self._chance.random() < 0.3:
            raise WriteError("away before")
        await super().write(entries)
        if self._chance.random() < 0.3:
            raise WriteError("away after")


async def test_what_is_settled_is_durable_with_every_field(rooms):
    entries = [an_entry(finish_reason=None, ttft_ms=None), an_entry(status=499, finish_reason="cancelled")]
    async with ledger_of(writer_for(rooms)) as ledger:
        for number, entry in enumerate(entries, 1):
            await ledger.settle(entry)
            assert len(await rows(rooms)) == number
    assert settled(await rows(rooms)) == settled(entries)
    await check_chain(rooms, 2)


async def test_columns_that_mostly_say_nothing_are_written_where_one_row_of_a_commit_has_them(rooms):
    said = [{}, {"trace_id": ""}, {"end_user": "u"}, {"engine_us": 1}, {"reason": "r", "corrects": "req_0"}]
    entries = [an_entry(request_id=f"req_{number}", **fields) for number, fields in enumerate(said)]
    writer = writer_for(rooms)
    for num in (1, 2, len(entries)):
        await writer.write(entries[:num])
    assert await rows(rooms) == entries
    await writer.close()


async def test_written_twice_is_written_once_and_the_first_stands(rooms):
    first = an_entry()
    async with ledger_of(writer_for(rooms)) as ledger:
        await ledger.settle(first)
        await ledger.settle(msgspec.structs.replace(first, num_completion_tokens=999))
        await ledger.settle(an_entry())
    assert settled(await rows(rooms))[0] == first
    await check_chain(rooms, 3)


async def test_each_start_opens_a_chain_of_its_own(rooms):
    first, second = await open_chain(rooms), await open_chain(rooms)
    assert first.number < second.number
    async with rooms.engine.connect() as connection:
        assert [row.id for row in await connection.execute(sa.select(store.ledger_chains))] == [
            first.number,
            second.number,
        ]
    async with ledger_of(writer_for(rooms), chain=second) as ledger:
        await asyncio.gather(*(ledger.settle(an_entry()) for _ in range(3)))
    await check_chain(rooms, 3, number=second.number)


def test_the_time_of_a_chain_does_not_go_back():
    chain = Chain(1)
    assert [chain.extend(an_entry(), now).settled_at for now in (5, 7, 6, 8)] == [5, 7, 7, 8]


async def test_where_the_time_is_set_back_another_chain_goes_on_with_it(rooms, monkeypatch):
    seconds = [2_000_000_000]
    for module in ("gateway.ledger", "gateway.ledger.chains"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=lambda: float(seconds[0])))
    opened = [first := await open_chain(rooms)]

    async def another() -> Chain:
        opened.append(await open_chain(rooms))
        return opened[-1]

    ledger = Ledger(writer_for(rooms), settings.Store(), Clock(), first, lambda: 1, another=another)
    await ledger.settle(an_entry())
    seconds[0] -= 50
    await ledger.settle(an_entry())
    seconds[0] -= 50
    await ledger.settle(an_entry())
    await until(lambda: len(opened) == 2)
    await ledger.settle(an_entry())
    await ledger.close(5.0)
    found = sorted((row.chain != first.number, row.position, row.settled_at) for row in await rows(rooms))
    assert found == [*((False, place, 2_000_000_000) for place in (1, 2, 3)), (True, 1, 1_999_999_900)]


@pytest.mark.parametrize("num_rows", [1, 100])
async def test_a_request_that_two_gateways_settle_has_one_row_and_no_chain_has_a_gap(rooms, num_rows):
    """Of few rows and of many, as SQLite writes these in another way."""
    entries = [an_entry() for _ in range(num_rows)]
    chains = await open_chain(rooms), await open_chain(rooms)
    writer = writer_for(rooms)
    for chain in chains:
        batch = [chain.extend(entry, 1_795_000_000) for entry in [*entries[:1], an_entry(), *entries[1:]]]
        for _ in range(2):  # the second is a commit that was told to have failed, and had not
            await writer.write(batch)
    await writer.close()
    found = await rows(rooms)
    assert len(found) == num_rows + 2
    async with rooms.engine.connect() as connection:
        repeats = (await connection.execute(sa.select(store.ledger_repeats).order_by("position"))).all()
    assert {row.chain for row in repeats} == {chains[1].number}
    assert [row.position for row in repeats] == [1, *range(3, num_rows + 2)]
    assert {row.request_id for row in repeats} == {entry.request_id for entry in entries}


async def test_a_row_that_nobody_could_join_is_written_at_once(rooms, clock):
    async with ledger_of(writer_for(rooms), clock) as ledger:
        async with asyncio.timeout(PATIENCE_S):
            await ledger.settle(an_entry())
    assert clock.waits() == []


async def test_rows_of_open_requests_share_a_commit(rooms, clock):
    writer = Counting(writer_for(rooms))
    async with ledger_of(writer, clock, num_open=5) as ledger:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(ledger.settle(an_entry()) for _ in range(5)))
    assert writer.sizes == [5]
    assert len(await rows(rooms)) == 5


async def test_a_row_waits_for_others_only_so_long(rooms, clock):
    writer = Counting(writer_for(rooms))
    async with ledger_of(writer, clock, num_open=100, ledger_flush_ms=2.0) as ledger:
        settling = [asyncio.ensure_future(ledger.settle(an_entry())) for _ in range(3)]
        await until(lambda: ledger.num_pending == 3)
        clock.advance(0.0019)
        assert writer.sizes == []
        clock.advance(0.0001)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*settling)
    assert writer.sizes == [3]


async def test_a_caller_that_is_cancelled_has_its_row_all_the_same(rooms, clock):
    async with ledger_of(writer_for(rooms), clock, num_open=2) as ledger:
        settling = asyncio.ensure_future(ledger.settle(an_entry()))
        await until(lambda: ledger.num_pending)
        settling.cancel()
    assert len(await rows(rooms)) == 1


async def test_a_commit_that_fails_is_tried_again_and_the_rows_wait(rooms, clock, caplog):
    class Away(Counting):
        away = True

        async def write(self, entries: Sequence[Entry]) -> None:
            if self.away:
                raise WriteError("disk is full")
            await super().write(entries)

    writer = Away(writer_for(rooms))
    async with ledger_of(writer, clock, num_open=1) as ledger:
        settling = [asyncio.ensure_future(ledger.settle(an_entry()))]
        await until(lambda: clock.waits() == [FIRST_RETRY_S])
        with pytest.raises(errors.LedgerBehind):
            ledger.check_room()
        settling.append(asyncio.ensure_future(ledger.settle(an_entry())))
        await until(lambda: ledger.num_pending == 2)
        writer.away = False
        clock.advance(FIRST_RETRY_S)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*settling)
        ledger.check_room()
    assert len(await rows(rooms)) == 2
    assert "1 rows cannot be written (disk is full); next try in 0.1 s" in caplog.text


async def test_rows_that_cannot_be_written_at_the_end_are_in_the_log(rooms, clock, caplog):
    class Away(Counting):
        async def write(self, entries: Sequence[Entry]) -> None:
            raise WriteError("disk is full")

    ledger = Ledger(Away(writer_for(rooms)), settings.Store(), clock, Chain(1))
    entry = an_entry()
    settling = asyncio.ensure_future(ledger.settle(entry))
    await until(clock.waits)
    await ledger.close(0.01)
    settling.cancel()
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert entry.request_id in record.getMessage()


async def test_sqlite_that_is_locked_by_another_is_a_failed_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.ledger.writers.PRAGMAS", ("busy_timeout = 1",))
    async with store.opened(settings.Store(data_dir=str(tmp_path))) as rooms:
        writer = SqliteWriter(rooms.database)
        other = sqlite3.connect(rooms.database, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(WriteError, match="locked"):
            await writer.write([an_entry()])
        other.execute("ROLLBACK")
        await writer.write([an_entry()])
        await writer.close()
        other.close()
        assert len(await rows(rooms)) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_each_request_is_written_exactly_once_through_failures_and_cancellations(rooms, seed, caplog):
    """A seeded walk: many requests end at once, some hang up or settle twice, and the database is away at times."""
    chance = random.Random(seed)
    caplog.set_level(logging.CRITICAL)
    writer = Failing(writer_for(rooms), random.Random(seed + 100))
    entries = [an_entry(num_completion_tokens=chance.randint(0, 1000)) for _ in range(300)]
    clock = HandClock()
    running = True

    async def pass_time() -> None:
        while running:
            clock.advance(0.01)
            await asyncio.sleep(0)

    passing = asyncio.ensure_future(pass_time())
    num_open = num_settled = 0
    ledger = Ledger(writer, settings.Store(), clock, Chain(1), lambda: num_open)

    async def one(entry: Entry) -> None:
        nonlocal num_open, num_settled
        num_open += 1
        try:
            num_settled += 1
            await ledger.settle(entry)
            if chance.random() < 0.1:
                num_settled += 1
                await ledger.settle(entry)
        finally:
            num_open -= 1

    tasks = []
    for entry in entries:
        tasks.append(asyncio.ensure_future(one(entry)))
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            await asyncio.sleep(0)
            tasks[-1].cancel()
    await asyncio.wait(tasks, timeout=PATIENCE_S)
    await ledger.close(PATIENCE_S)
    running = False
    await passing
    assert settled(await rows(rooms)) == settled(entries), f"seed {seed}"
    assert len(writer.sizes) < len(entries)
    await check_chain(rooms, num_settled)


async def test_how_long_answers_waited_for_their_rows_is_counted(rooms, clock):
    async with ledger_of(writer_for(rooms), clock, num_open=2, ledger_flush_ms=4.0) as ledger:
        waiting = asyncio.ensure_future(ledger.settle(an_entry()))
        await until(lambda: ledger.num_pending == 1)
        clock.advance(0.004)
        await waiting
        view = ledger.added.view()
    assert (view.num, view.mean_ms) == (1, pytest.approx(4.0))
    assert [bucket.max_ms for bucket in view.buckets if bucket.num] == [5.0]
