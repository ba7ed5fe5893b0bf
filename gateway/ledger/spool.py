"""The ledger's rows while PostgreSQL is away: kept on this machine's disk, and brought over when it is back.

A row is durable here as it would be there, so answers end as ever. Which rows came over is settled by their request
ids: one that is brought twice is written once. Gateways that share a data directory share its spool.

A row that does not come over by itself, because this version does not understand it or the database does not take it,
is set aside in the same file: it holds up none of the others, and is tried again when the file is next opened.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.clock import Clock
from gateway.ledger.entry import Entry, RowRefused, WriteError, Writer
from gateway.ledger.salvage import alone, is_damage, salvage
from gateway.store import PRAGMAS
from gateway.store.sqlite import private

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long the database may take for one commit before it counts as away."""
RETRY_S = 1.0
"""Between two tries to bring rows over."""
MAX_BATCH = 1000
"""Rows that are brought over in one commit."""
MAX_ROWS = 1_000_000
"""Rows that are kept here; with more, requests wait for the database, and then new ones are refused."""
DEFAULTS = {
    field.name: field.default for field in msgspec.structs.fields(Entry) if field.default is not msgspec.NODEFAULT
}
"""Of columns that a row of before has not."""
SCHEMA = "CREATE TABLE IF NOT EXISTS spool (request_id TEXT PRIMARY KEY, entry BLOB NOT NULL)"
ASIDE = "CREATE TABLE IF NOT EXISTS aside (request_id TEXT PRIMARY KEY, entry BLOB NOT NULL)"


class SpooledWriter:
    """A ``Writer`` that has the spool to fall back on."""

    def __init__(self, writer: Writer, path: Path, clock: Clock, patience_s: float = PATIENCE_S) -> None:
        """Brings over what an earlier gateway has left at ``path``."""
        self._writer = writer
        self._path = path
        self._clock = clock
        self._patience_s = patience_s
        self._spool: Spool | None = None
        self._is_away = False
        self._tries: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._has_more = False
        """Rows may have been kept since it was last looked."""
        self.came_over: Callable[[], None] = lambda: None
        """Called when rows have, and none are left that will."""
        if path.exists():
            self._drain()

    async def write(self, entries: Sequence[Entry]) -> None:
        if not self._is_away:
            try:
                return await self._in_time(self._writer.write(entries))
            except RowRefused as error:
                log.error(
                    "ledger: one of %d rows is refused, so they go by way of %s: %s", len(entries), self._path, error
                )
            except WriteError as error:
                log.error("ledger: the database is away, so rows are kept in %s: %s", self._path, error)
                self._is_away = True
        try:
            await asyncio.to_thread(self._open().keep, entries)
        except WriteError:
            self._is_away = False  # there is nothing but the database to try again
            raise
        self._drain()

    @property
    def is_away(self) -> bool:
        """The database is, as far as the last try has shown."""
        return self._is_away

    @property
    def num_rows(self) -> int:
        """Rows in the file, once it was opened; with those that do not come over."""
        return 0 if self._spool is None else self._spool.num_rows + self._spool.num_aside

    async def kept(self, request_ids: Sequence[str]) -> set[str]:
        """Those of them whose rows are kept here."""
        if not self._path.exists():
            return set()
        return await asyncio.to_thread(self._open().kept, request_ids)

    async def close(self) -> None:
        """What has not come over stays for the next gateway."""
        tasks = [*self._tries, *([self._draining] if self._draining else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._writer.close()
        if self._spool is not None:
            self._spool.close()

    async def _in_time(self, work: Coroutine[None, None, None]) -> None:
        """Raises WriteError. A commit that takes too long is left to its end, which a driver may be long in finding."""
        attempt = asyncio.ensure_future(work)
        self._tries.add(attempt)
        attempt.add_done_callback(self._tries.discard)
        done, _ = await asyncio.wait([attempt], timeout=self._patience_s)
        if not done:
            attempt.add_done_callback(_ignore)
            attempt.cancel()
            raise WriteError(f"no commit within {self._patience_s:g} s")
        attempt.result()

    def _open(self) -> Spool:
        if self._spool is None:
            self._spool = Spool(self._path)
        return self._spool

    def _drain(self) -> None:
        self._has_more = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._bring_over())
            self._draining.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._draining = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.critical("ledger: what is kept in %s does not come over", self._path, exc_info=error)
        elif self._has_more:  # kept after the last look, and before the task was over
            self._drain()

    async def _bring_over(self) -> None:
        """Until nothing is left."""
        spool, most, trouble, have_come = self._open(), MAX_BATCH, "", False
        while self._has_more:
            self._has_more = False
            try:
                while entries := await asyncio.to_thread(spool.oldest, most):
                    most = await self._brought(spool, entries)
                    have_come = True
            except (sqlite3.Error, OSError) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.error("ledger: what is kept in %s cannot be brought over now: %s", self._path, trouble)
                self._has_more = True
                await self._clock.sleep(RETRY_S)
        self._is_away = False
        if have_come:
            self.came_over()

    async def _brought(self, spool: Spool, entries: Sequence[Entry]) -> int:
        """How many should be brought next. Of rows of which one is refused half as many are tried, down to that one."""
        try:
            await self._in_time(self._writer.write(entries))
        except RowRefused as error:
            if len(entries) > 1:
                return len(entries) // 2
            log.critical("ledger: refused (%s), and set aside in %s: %s", error, self._path, entries[0])
            await asyncio.to_thread(spool.set_aside, [_key_of(entries[0])])
            return MAX_BATCH
        except WriteError:
            self._is_away = True
            await self._clock.sleep(RETRY_S)
            return MAX_BATCH
        if self._is_away:
            log.warning("ledger: the database is back, and gets the rows that were kept meanwhile")
            self._is_away = False
        await asyncio.to_thread(spool.forget, entries)
        return MAX_BATCH


class Spool:
    """The file. Its methods block, and may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self.num_rows = 0
        """In the file, as far as this gateway knows: what others do there is learned from ``oldest``."""
        self.num_aside = 0
        """Set aside since this gateway has opened it."""

    def keep(self, entries: Sequence[Entry]) -> None:
        """Durable when it returns. Raises WriteError."""
        with self._lock:
            if (num_rows := self.num_rows + self.num_aside) + len(entries) > MAX_ROWS:
                raise WriteError(f"{self._path} holds {num_rows} rows already")
            rows = [(_key_of(entry), msgspec.json.encode(msgspec.structs.asdict(entry))) for entry in entries]
            try:
                connection = self._open()
                with connection:
                    num_new = connection.executemany("INSERT OR IGNORE INTO spool VALUES (?, ?)", rows).rowcount
            except (sqlite3.Error, OSError) as error:
                raise WriteError(f"{self._path}: {error}") from error
            self.num_rows += num_new

    def oldest(self, num_rows: int) -> list[Entry]:
        """So many at most; none only where there are none. Raises sqlite3.Error."""
        with self._lock:
            while True:
                rows = self._oldest(num_rows)
                entries, odd = [], []
                for request_id, kept in rows:
                    try:
                        entries.append(_entry_of(kept))
                    except msgspec.DecodeError:  # of another version, whose rows have other columns
                        log.critical("ledger: not understood, and set aside in %s: %s", self._path, kept)
                        odd.append(request_id)
                self._set_aside(odd)
                # Other gateways keep rows here and bring them over, too; fewer than were asked for are all of them.
                self.num_rows = len(entries) if len(rows) < num_rows else max(self.num_rows, len(entries))
                if entries or not rows:
                    return entries

    def set_aside(self, keys: Sequence[str]) -> None:
        """They are left for whoever opens the file next. Raises sqlite3.Error."""
        with self._lock:
            self._set_aside(keys)

    def kept(self, request_ids: Sequence[str]) -> set[str]:
        """Those of them whose rows are here."""
        with self._lock:
            connection = self._open()
            found: set[str] = set()
            for request_id in request_ids:
                # With a place behind it, or without.
                names = [request_id, f"{request_id} ", f"{request_id}!"]
                for table in ("spool", "aside"):
                    query = f"SELECT count(*) FROM {table} WHERE request_id = ? OR request_id BETWEEN ? AND ?"
                    ((num,),) = connection.execute(query, names)
                    if num:
                        found.add(request_id)
            return found

    def forget(self, entries: Sequence[Entry]) -> None:
        with self._lock, self._open() as connection:
            keys = [(_key_of(entry),) for entry in entries]
            self.num_rows -= connection.executemany("DELETE FROM spool WHERE request_id = ?", keys).rowcount

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def _oldest(self, num_rows: int) -> list[tuple[str, bytes]]:
        query = "SELECT request_id, entry FROM spool ORDER BY rowid LIMIT ?"
        try:
            return self._open().execute(query, [num_rows]).fetchall()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._salvage()
            return self._open().execute(query, [num_rows]).fetchall()

    def _set_aside(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._open() as connection:
                connection.execute("INSERT OR IGNORE INTO aside SELECT * FROM spool WHERE request_id = ?", [key])
                num = connection.execute("DELETE FROM spool WHERE request_id = ?", [key]).rowcount
            self.num_rows, self.num_aside = self.num_rows - num, self.num_aside + num

    def _salvage(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        salvage(self._path, SCHEMA)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection = self._opened()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._salvage()
                self._connection = self._opened()
        return self._connection

    def _opened(self) -> sqlite3.Connection:
        """Gateways that lose their database make the file at the same instant. SQLite would tell all but one of them
        that it is locked, at once: it has nobody wait while the mode of a file changes."""
        with alone(self._path):
            private(self._path)
            connection = sqlite3.connect(self._path, check_same_thread=False)
            try:
                for pragma in PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}").close()
                connection.execute(SCHEMA)
                connection.execute(ASIDE)
                with connection:  # this version, or this database, may take them
                    connection.execute("INSERT OR IGNORE INTO spool SELECT * FROM aside")
                    connection.execute("DELETE FROM aside")
                self.num_aside = 0
                (self.num_rows,) = connection.execute("SELECT count(*) FROM spool").fetchone()
            except sqlite3.Error:
                connection.close()
                raise
            return connection


def _key_of(entry: Entry) -> str:
    """A row by its place too: two of one request are kept both, so that neither chain has a gap."""
    return f"{entry.request_id} {entry.chain} {entry.position}" if entry.position else entry.request_id


def _entry_of(kept: bytes) -> Entry:
    """A version of before kept fewer columns. Raises msgspec.DecodeError."""
    values = {**DEFAULTS, **msgspec.json.decode(kept, type=dict[str, Any])}
    if odd := values.keys() ^ set(Entry.__struct_fields__):
        raise msgspec.ValidationError(f"only one of us knows the column {min(odd)}")
    return msgspec.convert([values[name] for name in Entry.__struct_fields__], Entry)


def _ignore(task: asyncio.Task[None]) -> None:
    """How a commit ended that nobody waits for any more: its rows are in the spool."""
    if not task.cancelled():
        task.exception()
