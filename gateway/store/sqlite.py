"""A connection to SQLite that lets go of all it has when it is closed, and a thread for it that is ended once.

SQLite puts the end of a connection off, and that of its transaction, for as long as one of its statements is not done.
One whose waiter was cancelled, as by a client that hangs up, stays so until its cursor is collected, which may be long
in coming; until then nobody else could write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import aiosqlite


class Connection(sqlite3.Connection):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, *given: Any, **named: Any) -> Any:
        cursor = super().cursor(*given, **named)
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()
        super().close()


class OnThread(aiosqlite.Connection):
    """Whoever is cancelled while it waits for the end of the thread asks for it again; the thread that has ended by
    then would say nothing, and the event loop could not end."""

    def stop(self) -> asyncio.Future[Any] | None:
        return super().stop() if self._running else None


def private(path: Path) -> None:
    """The file is there, and where it was not nobody else can read it: nor what SQLite writes beside it, which it makes
    as open as the file. Raises OSError."""
    # One that is there is not opened: closing it would end the locks of all that this process has to do with it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def connect(database: str, **named: Any) -> OnThread:
    """As ``aiosqlite.connect``."""
    connection = OnThread(partial(sqlite3.connect, database, factory=Connection, **named), iter_chunk_size=64)
    connection._thread.daemon = True
    return connection
