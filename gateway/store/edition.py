"""Whether anything was written since, as cheaply as each database tells it: whoever waits for something in the store
asks this first, and looks for it only where the answer is another one.

SQLite tells a connection that is kept, from memory that it shares with whoever writes: it takes microseconds, so the
loop asks by itself. PostgreSQL tells which transactions a query would see now.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.store.tables import changes

PATIENCE_S = 10.0
"""How long PostgreSQL may take to tell."""
UNKNOWN = -1
"""A revision that the store never has."""


class Edition(NamedTuple):
    """The store at one moment. Between two that are equal nothing was committed."""

    revision: int
    """Of tenants, keys, policies and all else that ``Store.changing`` changes."""
    written: Hashable
    """Another one after each commit."""
    server: Hashable = None
    """Another one where a server has taken over from another, or was started again: what was committed last need not be
    there."""


# A server that takes over from another may number other transactions alike, so it says since when it is one.
_IN_POSTGRES = sa.select(
    sa.select(changes.c.revision).scalar_subquery(),
    sa.cast(sa.func.pg_current_snapshot(), sa.Text),
    sa.func.pg_postmaster_start_time(),
)


class InPostgres:
    """A database. The connection is kept here too: to take one of the pool's takes longer than to ask."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None
        self._turn = asyncio.Lock()

    async def edition(self) -> Edition:
        """Raises what the database raises, TimeoutError among it."""
        async with self._turn, asyncio.timeout(PATIENCE_S):
            if self._connection is not None:
                with contextlib.suppress(DBAPIError):  # it has broken since, and another need not
                    return await self._ask(self._connection)
            plain = await self._engine.connect()
            self._connection = await plain.execution_options(isolation_level="AUTOCOMMIT")
            return await self._ask(self._connection)

    async def _ask(self, connection: AsyncConnection) -> Edition:
        try:
            revision, snapshot, since = (await connection.execute(_IN_POSTGRES)).one()
        except BaseException:  # one that was broken off in the middle is good for nothing more
            self._connection = None
            await connection.invalidate()
            await connection.close()
            raise
        return Edition(revision, (snapshot, since), since)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class InSqlite:
    """A file. The connection is always the same: another would count in its own way."""

    def __init__(self, database: Path) -> None:
        self._connection = sqlite3.connect(database, timeout=0.0, isolation_level=None)
        self._last = Edition(UNKNOWN, None)

    async def edition(self) -> Edition:
        """One that is like no other where SQLite would have us wait: then it is to be looked."""
        try:
            ((written,),) = self._connection.execute("PRAGMA data_version")
            if written != self._last.written:
                ((revision,),) = self._connection.execute("SELECT revision FROM changes")
                self._last = Edition(revision, written)
        except sqlite3.Error:
            return Edition(UNKNOWN, object())
        return self._last

    async def close(self) -> None:
        self._connection.close()
