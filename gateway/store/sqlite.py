"""A connection to SQLite that lets go of all it has when it is closed.

SQLite puts the end of a connection off, and that of its transaction, for as long as one of its statements is not done.
One whose waiter was cancelled, as by a client that hangs up, stays so until its cursor is collected, which may be long
in coming; until then nobody else could write.
"""

from __future__ import annotations

import sqlite3
from typing import Any
from weakref import WeakSet


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
