"""Rows into the store, one commit after another: the way that suits each database."""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway import store
from gateway.ledger.chains import content_of
from gateway.ledger.entry import Entry, RowRefused, WriteError, Writer
from gateway.ledger.follow import NO_CHAIN
from gateway.store import PRAGMAS, Store
from gateway.store.upserts import insert_for

MAX_ROWS_A_STATEMENT = 32
"""Of SQLite's; as many are kept prepared."""
RECENT_S = 60.0
MAX_RECENT = 5000
"""Rows of the last minute that are kept for another server, at most."""
MAX_ROWS_AGAIN = 1000
"""Of those in one commit."""
REFUSED_STATES = ("22", "23")
"""How PostgreSQL's codes begin for what is wrong with a row: its values, or what a constraint says of them."""
_RARE = (
    "num_reasoning_tokens",
    "num_drafted_tokens",
    "num_accepted_tokens",
    "end_user",
    "safety_identifier",
    "metadata",
    "corrects",
    "reason",
    "upstream",
    "counted_by",
)
"""Columns that mostly say nothing, which is what the table says by itself."""
_TRACED = tuple(name for name in Entry.__struct_fields__ if name not in _RARE)
_USUAL = tuple(name for name in _TRACED if name != "trace_id")
"""Where no traces are made."""
_rare, _traced, _usual = (itemgetter(*map(Entry.__struct_fields__.index, names)) for names in (_RARE, _TRACED, _USUAL))
_NOTHING = tuple(field.default for field in msgspec.structs.fields(Entry) if field.name in _RARE)


def writer_for(rooms: Store) -> Writer:
    """The one that suits the store's database."""
    return PostgresWriter(rooms.engine) if rooms.database is None else SqliteWriter(rooms.database)


class PostgresWriter:
    """One statement a commit, with an array a column: the server takes rows apart faster than the driver.

    A standby that takes over may lack what was committed last. So the rows of the last minute before that are written
    again, which changes nothing where they are there.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._insert = _insert_arrays(engine.dialect)
        self._known: set[int] = set()
        """Chains that the database has, unless it was restored meanwhile."""
        self._since: object = None
        """When the server began that was written to last."""
        self._recent: deque[tuple[float, Entry]] = deque(maxlen=MAX_RECENT)
        """Written last, with their instants."""
        self._again: list[Entry] = []
        """Of those, the ones that another server took over with or without."""

    async def write(self, entries: Sequence[Entry]) -> None:
        try:
            since = await self._write(entries)
            if since != self._since:
                if self._since is not None:
                    self._known.clear()
                    self._again = [entry for _, entry in self._recent]  # whenever that was
                self._since = since
            self._note(entries)
            while portion := self._again[:MAX_ROWS_AGAIN]:
                await self._write(portion)
                del self._again[: len(portion)]
        except (SQLAlchemyError, OSError) as error:
            self._known.clear()
            state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
            raise (RowRefused if state.startswith(REFUSED_STATES) else WriteError)(store.cause_of(error)) from error

    async def close(self) -> None:
        """The pool is the store's."""

    async def _write(self, entries: Sequence[Entry]) -> object:
        """One commit; since when its server is one."""
        columns = tuple(map(list, zip(*map(msgspec.structs.astuple, entries), strict=True)))
        async with self._engine.begin() as connection:
            if not self._known.issuperset(chains := {entry.chain for entry in entries}):
                await self._know(connection, entries)
            num_inserted, since = tuple((await connection.exec_driver_sql(self._insert, columns)).one())
            if num_inserted < len(entries):
                await self._note_repeats(connection, entries)
        self._known |= chains
        return since

    def _note(self, entries: Sequence[Entry]) -> None:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        self._recent.extend((now, entry) for entry in entries)

    async def _know(self, connection: AsyncConnection, entries: Sequence[Entry]) -> None:
        """Rows may be of chains that a restored database has not heard of, and those nobody would follow."""
        opened_at: dict[int, int] = {}
        for entry in entries:
            opened_at[entry.chain] = min(entry.settled_at, opened_at.get(entry.chain, entry.settled_at))
        opened_at.pop(NO_CHAIN, None)
        if rows := [{"id": chain, "opened_at": at, "gateway": ""} for chain, at in opened_at.items()]:
            await connection.execute(insert_for("postgresql")(store.ledger_chains).on_conflict_do_nothing(), rows)

    async def _note_repeats(self, connection: AsyncConnection, entries: Sequence[Entry]) -> None:
        rows = store.ledger.c
        query = sa.select(rows.request_id, rows.chain, rows.position)
        found = await connection.execute(query.where(rows.request_id.in_([entry.request_id for entry in entries])))
        if repeats := _repeats(entries, {request_id: (chain, position) for request_id, chain, position in found}):
            await connection.execute(insert_for("postgresql")(store.ledger_repeats).on_conflict_do_nothing(), repeats)


def _insert_arrays(dialect: sa.Dialect) -> str:
    columns = store.ledger.c
    arrays = ", ".join(f"${number}::{column.type.compile(dialect)}[]" for number, column in enumerate(columns, 1))
    return (
        f"WITH inserted AS (INSERT INTO {store.ledger.name} ({', '.join(columns.keys())})"
        f" SELECT * FROM unnest({arrays}) ON CONFLICT (request_id) DO NOTHING RETURNING 1)"
        " SELECT count(*), pg_postmaster_start_time() FROM inserted"
    )


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
                    # Its own transaction: each call hands the interpreter over and back.
                    num_inserted = _insert_rows(connection, entries)
                    if num_inserted < len(entries):
                        _note_repeats(connection, entries)
                else:
                    with connection:  # commits, or rolls back
                        connection.execute("BEGIN")
                        num_inserted = sum(
                            _insert_rows(connection, entries[start : start + MAX_ROWS_A_STATEMENT])
                            for start in range(0, len(entries), MAX_ROWS_A_STATEMENT)
                        )
                        if num_inserted < len(entries):
                            _note_repeats(connection, entries)
            except Exception as error:  # a thread that ends is one that nobody hears from again
                failure = WriteError(f"{error}" if isinstance(error, sqlite3.Error) else repr(error))
            written.get_loop().call_soon_threadsafe(_tell, written, failure)
        if connection is not None:
            connection.close()


def _repeats(entries: Sequence[Entry], places: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Those of the entries whose requests have their row at another place: rows for ``ledger_repeats``. ``places`` is
    (chain, position) of what is there."""
    return [
        {
            "chain": entry.chain,
            "position": entry.position,
            "request_id": entry.request_id,
            "content": content_of(entry),
        }
        for entry in entries
        if entry.position and places.get(entry.request_id) != (entry.chain, entry.position)
    ]


def _insert_rows(connection: sqlite3.Connection, entries: Sequence[Entry]) -> int:
    """How many were not there before."""
    rows = list(map(msgspec.structs.astuple, entries))
    if set(map(_rare, rows)) == {_NOTHING}:  # columns that say nothing would be a third of what a row costs
        has_traces = any(entry.trace_id is not None for entry in entries)
        columns, told = (_TRACED, _traced) if has_traces else (_USUAL, _usual)
        statement, rows = _insert(len(rows), columns), list(map(told, rows))
    else:
        statement = _insert(len(rows), Entry.__struct_fields__)
    cursor = connection.execute(statement, list(itertools.chain.from_iterable(rows)))
    num_inserted = cursor.rowcount
    cursor.close()
    return num_inserted


def _note_repeats(connection: sqlite3.Connection, entries: Sequence[Entry]) -> None:
    query = f"SELECT chain, position FROM {store.ledger.name} WHERE request_id = ?"
    places = {entry.request_id: connection.execute(query, [entry.request_id]).fetchone() for entry in entries}
    insert = f"INSERT OR IGNORE INTO {store.ledger_repeats.name} VALUES (:chain, :position, :request_id, :content)"
    connection.executemany(insert, _repeats(entries, places))


@functools.cache
def _insert(num_rows: int, columns: tuple[str, ...]) -> str:
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
