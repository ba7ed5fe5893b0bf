"""What is told to the operator while the gateway runs: its log, on standard error, and what is counted.

Two kinds of lines: records of the standard library's logging, and events, which are Structs and told by their fields.
Events come with every request, so they take a short way of their own. Lines are written together, a few times a second;
warnings and worse at once.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import logging
import re
import sys
import time
from typing import TextIO

import msgspec

from policies import settings

FLUSH_S = 0.1
MAX_WAITING_LINES = 512
NOISY = ("aiohttp", "asyncio", "alembic", "sqlalchemy", "aiosqlite")
"""Libraries whose information is for their own developers."""

TTFT_ERROR_BOUNDS_MS = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0)
"""How far off a predicted time to the first token may be to be counted here and not above."""

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-[ -~]*)?"
)


class Bucket(msgspec.Struct, frozen=True):
    """Of a histogram: those that are above the bound before and at most this one."""

    max_ms: float | None
    """Null: the last one, without a bound."""
    num: int


class ErrorView(msgspec.Struct, frozen=True):
    """How far predictions were off since start: predicted less real, so above zero is what came sooner."""

    num: int
    mean_ms: float | None
    """Either way (mean absolute error); null: there was none."""
    bias_ms: float | None
    """Mean with its sign."""
    buckets: list[Bucket]
    """Of the errors either way."""


class TimesView(msgspec.Struct, frozen=True):
    """How long something took, since start."""

    num: int
    mean_ms: float | None
    """Null: there was none."""
    buckets: list[Bucket]


class Times:
    """A histogram of milliseconds."""

    __slots__ = ("_bounds_ms", "_counts", "_sum_ms")

    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self._bounds_ms = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self._sum_ms = 0.0

    def add(self, ms: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_ms, ms)] += 1
        self._sum_ms += ms

    def view(self) -> TimesView:
        num = sum(self._counts)
        buckets = [Bucket(max_ms, num) for max_ms, num in zip((*self._bounds_ms, None), self._counts, strict=True)]
        return TimesView(num, self._sum_ms / num if num else None, buckets)


class Errors:
    """A histogram of predictions that can be compared with what came."""

    __slots__ = ("_off", "_sum_ms")

    def __init__(self, bounds_ms: tuple[float, ...] = TTFT_ERROR_BOUNDS_MS) -> None:
        self._off = Times(bounds_ms)
        self._sum_ms = 0.0

    def add(self, error_ms: float) -> None:
        self._off.add(abs(error_ms))
        self._sum_ms += error_ms

    def view(self) -> ErrorView:
        off = self._off.view()
        return ErrorView(off.num, off.mean_ms, self._sum_ms / off.num if off.num else None, off.buckets)


class Fields(logging.Formatter):
    """A line each: time, level, and text or ``key=value`` pairs; or the same as a JSON object. That one also has the
    fields of an event that mostly say nothing, those with a default."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._second, self._stamp = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        at, level, text = self._time(record.created), record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if not self._as_json:
            return f"{at} {level:7} {text}" + (f"\n{trace}" if trace else "")
        line = {"time": at, "level": level, "logger": record.name, "message": text}
        return msgspec.json.encode({**line, "trace": trace} if trace else line).decode()

    def event(self, event: msgspec.Struct, unix_s: float) -> str:
        """What happened then."""
        at = self._time(unix_s)
        if self._as_json:
            line = {"time": at, "level": "info", **msgspec.structs.asdict(event)}
            return msgspec.json.encode(line).decode()
        num_fields, optional = _said(type(event))
        values = msgspec.structs.astuple(event)[:num_fields]
        absent = tuple([place for place in optional if values[place] is None])
        return f"{at} info    {_pattern(type(event), absent) % values}"

    def _time(self, at: float) -> str:
        """ISO 8601 in UTC, to the millisecond. A second's text is made once."""
        second = int(at)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._stamp}.{int(1000 * (at - second)):03}Z"


@functools.cache
def _said(kind: type[msgspec.Struct]) -> tuple[int, list[int]]:
    """How many fields a line of text has, which are those without a default, and the places of those that may be
    None."""
    fields = [field for field in msgspec.structs.fields(kind) if field.required]
    return len(fields), [place for place, field in enumerate(fields) if "None" in str(field.type)]


@functools.lru_cache(256)
def _pattern(kind: type[msgspec.Struct], absent: tuple[int, ...]) -> str:
    """``a=%s b=%.1f c=-%.0s``: floats are cut to tenths, and what is absent is a dash."""
    pairs = []
    for place, field in enumerate(msgspec.structs.fields(kind)[: _said(kind)[0]]):
        shape = "-%.0s" if place in absent else "%.1f" if "float" in str(field.type) else "%s"
        pairs.append(f"{field.name}={shape}")
    return " ".join(pairs)


class Lines(logging.Handler):
    """Lines to a stream, several in one write while a loop runs."""

    def __init__(self, stream: TextIO, form: Fields) -> None:
        super().__init__()
        self.setFormatter(form)
        self._form = form
        self._stream = stream
        self._waiting: list[str | tuple[msgspec.Struct, float]] = []
        """Lines, and events with their instants."""

    def emit(self, record: logging.LogRecord) -> None:
        self._add(self._form.format(record), at_once=record.levelno >= logging.WARNING)

    def event(self, event: msgspec.Struct) -> None:
        """On the loop's thread. It is put into words with the others when they are written, which is sooner done than
        one now and one then."""
        self._add((event, time.time()), at_once=False)

    def flush(self) -> None:
        self.acquire()
        try:
            waiting, self._waiting = self._waiting, []
            lines = [line if isinstance(line, str) else self._form.event(*line) for line in waiting]
            if lines:
                with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more, or it is closed
                    self._stream.write("\n".join(lines) + "\n")
                    self._stream.flush()
        finally:
            self.release()

    def _add(self, line: str | tuple[msgspec.Struct, float], at_once: bool) -> None:
        waiting = self._waiting
        waiting.append(line)
        if at_once or len(waiting) >= MAX_WAITING_LINES:
            self.flush()
        elif len(waiting) == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
            except RuntimeError:  # another thread, or before the loop and after it
                self.flush()


_events: Lines | None = None


def tell(event: msgspec.Struct) -> None:
    """Logs an event at the level of information."""
    if _events is not None:
        _events.event(event)


def trace_id_of(traceparent: str) -> str | None:
    """The trace that a request belongs to, by its header (W3C Trace Context, section 3.2); None when it names none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    return None if found["trace"] == "0" * 32 or found["parent"] == "0" * 16 else found["trace"]


def log_to_stderr(config: settings.Log) -> None:
    """Everything that is logged, from ``config.level`` up, and events from "info" down."""
    global _events
    # Nobody prints them, and finding them costs more than the rest of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = Lines(sys.stderr, Fields(config.format == "json"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(config.level.upper())
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _events = handler if log.isEnabledFor(logging.INFO) else None
