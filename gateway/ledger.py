"""What was delivered, written down: a row for each finished request, durable before its answer ends.

Commits are shared. A row that comes while nothing is being written and nobody else could join it is written at once;
the others wait until all requests that are open have come, or for ``store.ledger_flush_ms`` at most. Rows that a failed
commit leaves behind are tried again; a row is inserted once however often it is written.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import store
from gateway.clock import Clock, Timer
from gateway.errors import LedgerBehind
from gateway.store import PRAGMAS, Store
from policies import settings
from policies.answers import Outcome

log = logging.getLogger(__name__)

MAX_BATCH = 1000
"""Rows of one commit."""
MAX_ROWS_A_STATEMENT = 32
"""As many statements are kept prepared."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One row; the fields stand in the order of the table's columns."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    status: int
    """HTTP's; 499 when the client went away."""
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_sequences: int
    created_at: int
    """Unix seconds."""
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    sla_class: str
    service_tier: str
    """The one that served it, as OpenAI names it."""
    cache: Outcome
    policy_name: str
    policy_version: int
    """The version that admitted it."""
    cost_micros: int
    """Millionths of the currency's unit."""
    num_reasoning_tokens: int = 0
    """Of the completion's."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of those drafted."""
    engine_us: int = 0
    """Its share of every step that it was in, in microseconds."""
    kv_block_ms: int = 0
    """KV blocks that it held, times milliseconds."""
    price_version: str = ""
    """By which the cost was counted."""
    end_user: str | None = None
    """The client's ``user``."""
    safety_identifier: str | None = None
    metadata: str | None = None
    """The client's, as JSON."""
    trace_id: str | None = None
    corrects: str | None = None
    """The request whose row this one corrects."""
    reason: str | None = None
    """Of a correction."""
    settled_at: int = 0
    """Unix seconds; the day and the period that the row belongs to."""
    chain: int = 0
    position: int = 0
    """In its chain, from 1."""
    link: bytes | None = None
    """SHA-256 over the link before and the row."""


assert Entry.__struct_fields__ == tuple(store.ledger.c.keys())


class WriteError(Exception):
    """The rows may not have been written; they can be written again."""


class Writer(Protocol):
    """One commit after another."""

    async def write(self, entries: Sequence[Entry]) -> None:
        """Returns when the rows are durable. Raises WriteError. Not called again before it has returned."""

    async def close(self) -> None: ...


class Ledger:
    """The only writer of what a tenant owes."""

    def __init__(
        self, writer: Writer, config: settings.Store, clock: Clock, num_open: Callable[[], int] = lambda: 1
    ) -> None:
        """``num_open``: requests that have not been answered; as many rows may still come."""
        self._writer = writer
        self._flush_s = 1e-3 * config.ledger_flush_ms
        self._max_backlog = config.max_ledger_backlog
        self._clock = clock
        self._num_open = num_open
        self._pending: list[tuple[Entry, asyncio.Future[None]]] = []
        self._timer: Timer | None = None
        self._writing: asyncio.Task[None] | None = None

    async def settle(self, entry: Entry) -> None:
        """Returns when the row is durable. It will be, also when the caller is cancelled meanwhile."""
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((entry, durable))
        if self._writing is None:
            if len(self._pending) >= self._num_worth_a_commit():
                self._flush()
            elif self._timer is None:
                self._timer = self._clock.call_later(self._flush_s, self._flush)
        await durable

    def check_room(self) -> None:
        """Raises LedgerBehind when so much waits to be written that nothing more should be delivered."""
        if len(self._pending) >= self._max_backlog:
            raise LedgerBehind(
                "This server cannot write its ledger at the moment. Please try again.", retry_after_s=1.0
            )

    @property
    def num_pending(self) -> int:
        """Rows that are not durable yet."""
        return len(self._pending)

    async def close(self, patience_s: float) -> None:
        """Writes what is pending, then lets go of the database. Rows that cannot be written in time go to the log."""
        try:
            async with asyncio.timeout(patience_s):
                while self._writing is not None or self._pending:
                    self._flush()
                    assert self._writing is not None
                    await asyncio.shield(self._writing)
        except TimeoutError:
            assert self._writing is not None
            self._writing.cancel()
            await asyncio.wait([self._writing])
            for entry, _ in self._pending:
                log.critical("ledger: not written: %s", msgspec.json.encode(msgspec.structs.asdict(entry)).decode())
        await self._writer.close()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and self._pending:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        """One commit, and the next ones as long as enough rows wait for them."""
        try:
            while self._pending:
                began_at = self._clock.now()
                batch = self._pending[:MAX_BATCH]
                await self._write([entry for entry, _ in batch])
                del self._pending[: len(batch)]
                for _, durable in batch:
                    if not durable.done():  # its waiter may have been cancelled
                        durable.set_result(None)
                waited_s = self._clock.now() - began_at  # about as long as those that came meanwhile
                if len(self._pending) < self._num_worth_a_commit() and waited_s < self._flush_s:
                    break
        finally:
            self._writing = None
            if self._pending:
                self._timer = self._clock.call_later(self._flush_s, self._flush)

    def _num_worth_a_commit(self) -> int:
        return min(self._num_open(), MAX_BATCH) if self._flush_s else 1

    async def _write(self, entries: Sequence[Entry]) -> None:
        """Until it is done: what was delivered must be written down."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                return await self._writer.write(entries)
            except WriteError as error:
                log.error("ledger: %d rows cannot be written (%s); next try in %.3g s", len(entries), error, retry_s)
            await self._clock.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)


def writer_for(rooms: Store) -> Writer:
    """The one that suits the store's database."""
    return PostgresWriter(rooms.engine) if rooms.database is None else SqliteWriter(rooms.database)


class PostgresWriter:
    """Through SQLAlchemy's pool."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._insert = postgresql.insert(store.ledger).on_conflict_do_nothing()

    async def write(self, entries: Sequence[Entry]) -> None:
        rows = [msgspec.structs.asdict(entry) for entry in entries]
        try:
            async with self._engine.begin() as connection:
                await connection.execute(self._insert, rows)
        except (SQLAlchemyError, OSError) as error:
            raise WriteError(" ".join(str(getattr(error, "orig", None) or error).split())) from error

    async def close(self) -> None:
        """The pool is the store's."""


class SqliteWriter:
    """A thread of its own with a connection of its own.

    Many rows are one statement, so SQLite inserts and commits while the interpreter is free for others.
    """

    def __init__(self, database: Path) -> None:
        self._orders: queue.SimpleQueue[tuple[Sequence[Entry], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(database,), name="ledger", daemon=True)
        self._thread.start()

    async def write(self, entries: Sequence[Entry]) -> None:
        written = asyncio.get_running_loop().create_future()
        self._orders.put((entries, written))
        await written

    async def close(self) -> None:
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self, database: Path) -> None:
        connection: sqlite3.Connection | None = None
        while (order := self._orders.get()) is not None:
            entries, written = order
            failure = None
            try:
                if connection is None:
                    connection = _connect(database)
                if len(entries) <= MAX_ROWS_A_STATEMENT:
                    _insert_rows(
                        connection, entries
                    )  # its own transaction: each call hands the interpreter over and back
                else:
                    with connection:  # commits, or rolls back
                        connection.execute("BEGIN")
                        for start in range(0, len(entries), MAX_ROWS_A_STATEMENT):
                            _insert_rows(connection, entries[start : start + MAX_ROWS_A_STATEMENT])
            except sqlite3.Error as error:
                failure = WriteError(str(error))
            written.get_loop().call_soon_threadsafe(_tell, written, failure)
        if connection is not None:
            connection.close()


def _insert_rows(connection: sqlite3.Connection, entries: Sequence[Entry]) -> None:
    values = [value for entry in entries for value in msgspec.structs.astuple(entry)]
    connection.execute(_insert(len(entries)), values).close()


@functools.cache
def _insert(num_rows: int) -> str:
    columns = store.ledger.c.keys()
    row = f"({', '.join('?' * len(columns))})"
    return (
        f"INSERT INTO {store.ledger.name} ({', '.join(columns)}) VALUES {', '.join([row] * num_rows)} "
        "ON CONFLICT (request_id) DO NOTHING"
    )


def _connect(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(database, isolation_level=None)  # transactions begin and end where it says so
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").close()
    return connection


def _tell(written: asyncio.Future[None], failure: WriteError | None) -> None:
    if written.done():  # nobody waits any more
        return
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
