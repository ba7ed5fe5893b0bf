"""Rows into the store, one commit after another: the way that suits each database."""

from __future__ import annotations

import asyncio
import functools
import queue
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import store
from gateway.ledger.entry import Entry, WriteError, Writer
from gateway.store import PRAGMAS, Store

MAX_ROWS_A_STATEMENT = 32
"""As many statements are kept prepared."""


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
