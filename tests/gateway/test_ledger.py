"""The ledger on both databases: durable before settle returns, once, in shared commits, whatever goes wrong between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import sqlalchemy as sa

from gateway import errors, store
from gateway.clock import Clock
from gateway.ledger import FIRST_RETRY_S, Entry, Ledger, WriteError, Writer, writer_for
from gateway.ledger.writers import SqliteWriter
from gateway.store import Store
from policies import settings
from tests.builders import PATIENCE_S, HandClock, an_entry, until


@pytest.fixture
async def rooms(store_settings) -> AsyncIterator[Store]:
    async with store.opened(store_settings) as rooms:
        yield rooms


@contextlib.asynccontextmanager
async def ledger_of(
    writer: Writer, clock: Clock | None = None, num_open: int = 1, **limits: object
) -> AsyncIterator[Ledger]:
    ledger = Ledger(writer, settings.Store(**limits), clock or Clock(), lambda: num_open)
    yield ledger
    await ledger.close(PATIENCE_S)


async def rows(rooms: Store) -> list[tuple[object, ...]]:
    """What somebody else sees who opens the database now."""
    async with rooms.engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(sa.select(store.ledger).order_by("request_id"))]


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
    assert await rows(rooms) == sorted(msgspec.structs.astuple(entry) for entry in entries)


async def test_written_twice_is_written_once_and_the_first_stands(rooms):
    first = an_entry()
    async with ledger_of(writer_for(rooms)) as ledger:
        await ledger.settle(first)
        await ledger.settle(msgspec.structs.replace(first, num_completion_tokens=999))
    assert await rows(rooms) == [msgspec.structs.astuple(first)]


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
    async with ledger_of(writer, clock, num_open=1, max_ledger_backlog=2) as ledger:
        settling = [asyncio.ensure_future(ledger.settle(an_entry()))]
        await until(lambda: clock.waits() == [FIRST_RETRY_S])
        ledger.check_room()
        settling.append(asyncio.ensure_future(ledger.settle(an_entry())))
        await until(lambda: ledger.num_pending == 2)
        with pytest.raises(errors.LedgerBehind):
            ledger.check_room()
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

    ledger = Ledger(Away(writer_for(rooms)), settings.Store(), clock)
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
    num_open = 0
    ledger = Ledger(writer, settings.Store(), clock, lambda: num_open)

    async def one(entry: Entry) -> None:
        nonlocal num_open
        num_open += 1
        try:
            await ledger.settle(entry)
            if chance.random() < 0.1:
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
    assert await rows(rooms) == sorted(msgspec.structs.astuple(entry) for entry in entries), f"seed {seed}"
    assert len(writer.sizes) < len(entries)
