"""What can still be read of a spool's file that is damaged: cut in the middle of a write, or overwritten in places.

SQLite itself undoes a write that was cut. This is for what it then still calls malformed: the file is put aside, every
row that can be read is given to a new one, and how many there were is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from gateway.store.sqlite import private

log = logging.getLogger(__name__)

Row = tuple[str, bytes]
MIN_ROW_BYTES = 64
"""None is as short, so a file has no more rows than its bytes make of these."""
TABLE = "SELECT rowid, request_id, entry FROM spool"


def is_damage(error: sqlite3.Error) -> bool:
    """Rather than a disk that is full, a file that is locked, or a mistake of ours."""
    return type(error) is sqlite3.DatabaseError


def salvage(path: Path, schema: str) -> None:
    """Puts the file aside and what it held into a new one; does nothing where another has done so. Raises sqlite3.Error
    and OSError."""
    with alone(path):
        if _is_whole(path):
            return
        number = 1
        while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        rows = readable_in(aside)
        private(path)
        with contextlib.closing(sqlite3.connect(path)) as fresh, fresh:
            fresh.execute(schema)
            fresh.executemany("INSERT OR IGNORE INTO spool VALUES (?, ?)", rows)
    log.critical("ledger: %s was damaged: %d rows of it are recovered, and it lies in %s now", path, len(rows), aside)


def readable_in(path: Path) -> list[Row]:
    """Every row that can be read, in order: from the beginning, from the end, and one by one what lies between."""
    found: dict[int, Row] = {}
    with contextlib.closing(sqlite3.connect(path)) as damaged:
        damaged.execute("PRAGMA writable_schema = ON")  # else a file that is shorter than it says is not read at all
        _read(damaged, f"{TABLE} ORDER BY rowid", found)
        first_missing = max(found, default=0) + 1
        _read(damaged, f"{TABLE} ORDER BY rowid DESC", found)
        beyond = min((rowid for rowid in found if rowid > first_missing), default=first_missing)
        most = path.stat().st_size // MIN_ROW_BYTES  # a rowid that is damaged itself may be any number
        for rowid in range(first_missing, min(beyond, first_missing + most)):
            _read(damaged, f"{TABLE} WHERE rowid = {rowid}", found)
    return [found[rowid] for rowid in sorted(found)]


def _read(damaged: sqlite3.Connection, query: str, found: dict[int, Row]) -> None:
    """As far as it goes."""
    with contextlib.suppress(sqlite3.DatabaseError):
        for rowid, request_id, entry in damaged.execute(query):
            if isinstance(request_id, str) and isinstance(entry, bytes):
                found[rowid] = (request_id, entry)


def _is_whole(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (told,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            return bool(told == "ok")
    except sqlite3.DatabaseError:
        return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Of the gateways that share the file. Raises OSError."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
