"""Lines on their way to standard error or output: a thread writes them, so that whoever reads them may stall or leave.

A full pipe, or a terminal that is stopped, would else hold the event loop, and with it every answer. What waits is
bounded. What finds no room is dropped and counted, until all that waits is written and a line has said how much it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_BYTES = 4 << 20
"""That wait, the ones that are being written included."""


class Backlog:
    """Of one stream, which nobody else should write to meanwhile: lines would come between others'."""

    def __init__(self, stream: TextIO, missing: Callable[[int], str]) -> None:
        """``missing``: the line that says how many were dropped."""
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._missing = missing
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_full = False
        """Something was dropped behind all that waits."""
        self._is_torn = False
        """Of the last line only a part was written: a disk was full then."""
        self._num_untold = 0
        """Lines that were lost, and of which nothing is said yet."""
        self.num_lost = 0
        """Lines since start that were dropped, or that the stream did not take."""
        self._changed = threading.Condition()
        threading.Thread(target=self._write_forever, name="log", daemon=True).start()

    def write(self, lines: str) -> None:
        """Whole ones. Never waits for whoever reads them."""
        data = lines.encode(self._encoding, "backslashreplace")
        with self._changed:
            if self._is_full or self._num_bytes + len(data) > MAX_BYTES:
                self._is_full = True
                self._lost(data)
            else:
                self._waiting.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Until all that waits is written, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._num_bytes or self._is_full), timeout_s)

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_full)
                data = self._waiting.popleft() if self._waiting else b""
                num_told = 0 if data and self._is_full else self._num_untold
            told = self._missing(num_told).encode(self._encoding, "backslashreplace") if num_told else b""
            is_written = self._written(told + data)
            with self._changed:
                self._num_bytes -= len(data)
                self._is_full = self._is_full and bool(data)
                if is_written:
                    self._num_untold -= num_told
                else:
                    self._lost(data)
                self._changed.notify_all()

    def _lost(self, data: bytes) -> None:
        num = data.count(b"\n")
        self._num_untold += num
        self.num_lost += num

    def _written(self, data: bytes) -> bool:
        """False: nobody reads the stream any more, it is closed, or its disk is full."""
        with contextlib.suppress(OSError):
            data = b"\n" * self._is_torn + data
            while data:
                try:
                    num_bytes = os.write(self._descriptor, data)
                    self._is_torn = data[num_bytes - 1 : num_bytes] != b"\n"
                    data = data[num_bytes:]
                except BlockingIOError:  # another process has made it so, for all who have it
                    select.select([], [self._descriptor], [])
            return True
        return False
