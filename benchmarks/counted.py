"""The gateway that ``idle`` measures: the real one, which counts what SQLite is asked.

    python -m benchmarks.counted FILE ARGUMENTS

``ARGUMENTS`` are those of ``penstock``. ``FILE`` holds the number of statements so far, of all connections, in eight
bytes.
"""

from __future__ import annotations

import mmap
import os
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

from gateway.cli import main

NUMBER = struct.Struct("=Q")


def count_in(path: Path) -> None:
    """Every statement from now on, those that begin and end a transaction among them."""
    path.write_bytes(NUMBER.pack(0))
    file = os.open(path, os.O_RDWR)
    counted = mmap.mmap(file, NUMBER.size)
    os.close(file)
    connect = sqlite3.connect

    def counting(_: str) -> None:
        NUMBER.pack_into(counted, 0, NUMBER.unpack_from(counted)[0] + 1)

    def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.set_trace_callback(counting)
        return connection

    sqlite3.connect = connected  # type: ignore[assignment]


def num_counted(path: Path) -> int:
    (num,) = NUMBER.unpack(path.read_bytes())
    return int(num)


if __name__ == "__main__":
    count_in(Path(sys.argv.pop(1)))
    main(prog_name="penstock")
