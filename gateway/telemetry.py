"""What is told to the operator while the gateway runs: today its log, on standard error.

A record whose message is a Struct is an event with fields: a line of ``key=value`` pairs on a console, of JSON
otherwise. Lines are written together, a few times a second; warnings and worse at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TextIO

import msgspec

from policies import settings

FLUSH_S = 0.1
MAX_WAITING_LINES = 512


class Fields(logging.Formatter):
    """``time level text``, in a line."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._second, self._stamp = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        event = record.msg
        fields = msgspec.structs.asdict(event) if isinstance(event, msgspec.Struct) else None
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            line = {"time": self._time(record.created), "level": record.levelname.lower(), "logger": record.name}
            line |= {"message": record.getMessage()} if fields is None else fields
            if trace:
                line["trace"] = trace.strip()
            return msgspec.json.encode(line).decode()
        if fields is None:
            text = record.getMessage()
        else:
            text = " ".join([f"{name}={_short(value)}" for name, value in fields.items()])
        return f"{self._time(record.created)} {record.levelname.lower():7} {text}{trace}"

    def _time(self, created: float) -> str:
        """ISO 8601 in UTC, to the millisecond. A second's text is made once."""
        second = int(created)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._stamp}.{int(1000 * (created - second)):03}Z"


class Lines(logging.Handler):
    """Lines to a stream, several in one write while a loop runs."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.append(self.format(record))
            if record.levelno >= logging.WARNING or len(self._waiting) >= MAX_WAITING_LINES:
                self.flush()
            elif len(self._waiting) == 1:
                asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        except RuntimeError:  # another thread, or before the loop and after it
            self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more, or it is closed
            self.acquire()
            try:
                waiting, self._waiting = self._waiting, []
                if waiting:
                    self._stream.write("\n".join(waiting) + "\n")
                    self._stream.flush()
            finally:
                self.release()


def _short(value: object) -> str:
    return f"{value:.1f}" if type(value) is float else "-" if value is None else str(value)


def log_to_stderr(config: settings.Log) -> None:
    """Everything that is logged, from ``config.level`` up."""
    # Nobody prints them, and finding them costs more than the rest of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = Lines(sys.stderr)
    handler.setFormatter(Fields(config.format == "json"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(config.level.upper())
    for noisy in ("aiohttp", "asyncio", "alembic", "sqlalchemy", "aiosqlite"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
