"""What is told to the operator while the gateway runs: its log, on standard error, and what is counted.

Two kinds of lines: records of the standard library's logging, and events, which are Structs and told by their fields.
Events come with every request, so they take a short way of their own. Lines are written together, a few times a second;
warnings and worse at once; and nobody waits for whoever reads them (``backlog``). A record that is word for word one of
the last seconds is counted, and told once more with its number when they are over: what fails a thousand times a second
fills no disk. A record about one request has its ids behind its words, as fields: whoever writes it gives them along as
``extra`` (``about``, ``about_sent``).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import logging
import signal
import sys
import time
from typing import TextIO

import msgspec

from gateway.backlog import Backlog
from gateway.traceparent import context_of
from policies import settings, wire

FLUSH_S = 0.1
MAX_WAITING_LINES = 512
LAST_S = 2.0
"""How long a process that ends may go on writing."""
REPEAT_S = 10.0
"""So long the same record is counted and not told."""
MAX_REPEATS = 256
"""Different ones of which that is known."""
NOISY = ("aiohttp", "asyncio", "alembic", "sqlalchemy", "aiosqlite")
"""Libraries whose information is for their own developers."""

TTFT_ERROR_BOUNDS_MS = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0)
"""How far off a predicted time to the first token may be to be counted here and not above."""

IDS = ("request_id", "trace_id")
"""Of the request that a record is about."""

Said = tuple[str, int, str, str, str | None, str | None]
"""Logger, level, words, failure and ids of a record."""

log = logging.getLogger(__name__)


def about(request_id: str, trace_id: str | None = None) -> dict[str, str | None]:
    """The ``extra`` of a record about this request. ``trace_id``: None: it is in no trace that is known here."""
    return dict(zip(IDS, (request_id, trace_id), strict=True))


def about_sent(request: wire.Submit) -> dict[str, str | None]:
    """The same of one that is on its way: its trace is the one that its worker is told of."""
    return about(request.request_id, context_of(request.request_id, request.traceparent)[3:35] or None)


class Ended(msgspec.Struct, frozen=True):
    """A request that has no row in the ledger: it was refused before, or asked for nothing that is counted."""

    request_id: str
    tenant_id: str | None
    """None: nobody knows who asked."""
    key_id: str | None
    method: str
    route: str | None
    """As it is written here, so that nothing of what a client put into it is told; None: nothing is served there."""
    status: int
    duration_ms: float
    trace_id: str | None = None


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

    __slots__ = ("_bounds_ms", "_counts", "sum_ms")

    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self._bounds_ms = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self.sum_ms = 0.0

    def add(self, ms: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_ms, ms)] += 1
        self.sum_ms += ms

    def view(self) -> TimesView:
        num = sum(self._counts)
        buckets = [Bucket(max_ms, num) for max_ms, num in zip((*self._bounds_ms, None), self._counts, strict=True)]
        return TimesView(num, self.sum_ms / num if num else None, buckets)


class Errors:
    """A histogram of predictions that can be compared with what came."""

    __slots__ = ("_off", "_sum_ms")

    def __init__(self) -> None:
        self._off = Times(TTFT_ERROR_BOUNDS_MS)
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
        self._second = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        at, level, text = self._time(record.created), record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        ids = {name: value for name, value in zip(IDS, _ids_of(record), strict=True) if value is not None}
        if not self._as_json:
            text += "".join([f" {name}={value}" for name, value in ids.items()])
            return f"{at} {level:7} {text}" + (f"\n{trace}" if trace else "")
        line = {"time": at, "level": level, "logger": record.name, "message": text, **ids}
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
        trace_id = getattr(event, "trace_id", None)
        traced = "" if trace_id is None else f" trace_id={trace_id}"
        return f"{at} info    {_pattern(type(event), absent) % values}{traced}"

    def _time(self, at: float) -> str:
        """ISO 8601 in UTC, to the millisecond. A second's text is made once."""
        second, stamp = self._second
        if int(at) != second:
            second = int(at)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second, stamp
        return f"{stamp}.{int(1000 * (at - second)):03}Z"


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


class Repeats:
    """Records that come again and again."""

    def __init__(self) -> None:
        self._seen: dict[Said, list[float]] = {}
        """By what they say: until when they are counted, and how many were. The oldest stand first."""

    def __bool__(self) -> bool:
        return bool(self._seen)

    def counts(self, record: logging.LogRecord) -> bool:
        """It is one of those that were told just now."""
        seen = self._seen.get(_said_by(record))
        if seen is not None and record.created < seen[0] <= record.created + REPEAT_S:
            seen[1] += 1
            return True
        return False

    def told(self, record: logging.LogRecord) -> None:
        """From now on it is counted, unless so many different ones come that nobody could be helped by that."""
        if len(self._seen) < MAX_REPEATS:
            self._seen[_said_by(record)] = [record.created + REPEAT_S, 0]

    def over(self, unix_s: float) -> list[logging.LogRecord]:
        """Of those whose time is over, what is to be said of them; they are forgotten."""
        found = []
        for said, (until, num) in list(self._seen.items()):
            if unix_s < until <= unix_s + REPEAT_S:  # later than that: the clock was set back meanwhile
                break
            del self._seen[said]
            if num:
                name, level, text, _, *ids = said
                told = {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "created": unix_s}
                told |= zip(IDS, ids, strict=True)
                words = "once more" if num == 1 else f"{num:.0f} times more"
                found.append(logging.makeLogRecord({**told, "msg": f"{text} ({words} in {REPEAT_S:g} s)"}))
        return found


def _said_by(record: logging.LogRecord) -> Said:
    error = record.exc_info[1] if record.exc_info else None
    failure = "" if error is None else repr(error)
    return record.name, record.levelno, record.getMessage(), failure, *_ids_of(record)


def _ids_of(record: logging.LogRecord) -> tuple[str | None, str | None]:
    return getattr(record, "request_id", None), getattr(record, "trace_id", None)


class Lines(logging.Handler):
    """Lines to a stream, several in one write while a loop runs."""

    def __init__(self, stream: TextIO, form: Fields) -> None:
        super().__init__()
        self.setFormatter(form)
        self._form = form
        self.backlog = Backlog(stream, self._missing)
        self._waiting: list[str | tuple[msgspec.Struct, float]] = []
        """Lines, and events with their instants."""
        self._repeats = Repeats()
        self._looks_again = False
        """When the time of those that are counted is over."""

    def emit(self, record: logging.LogRecord) -> None:
        self._tell_repeats(record.created)
        if self._repeats.counts(record):
            return
        self._repeats.told(record)
        self._look_again()
        self._add(self._form.format(record), at_once=record.levelno >= logging.WARNING)

    def close(self) -> None:
        """What was counted until now is told, and written if somebody reads it."""
        self._tell_repeats(float("inf"))
        self.flush()
        self.backlog.drain(LAST_S)
        super().close()

    def say(self, sentence: str) -> None:
        """A line of its own, in order with the others."""
        self._add(sentence, at_once=True)

    def _tell_repeats(self, unix_s: float) -> None:
        for record in self._repeats.over(unix_s):
            record.created = min(unix_s, time.time())
            self._add(self._form.format(record), at_once=True)

    def _look_again(self) -> None:
        if not self._looks_again:
            with contextlib.suppress(
                RuntimeError
            ):  # another thread, or no loop: the next record tells what was counted
                asyncio.get_running_loop().call_later(REPEAT_S, self._time_is_over)
                self._looks_again = True

    def _time_is_over(self) -> None:
        self.acquire()
        try:
            self._looks_again = False
            self._tell_repeats(time.time())
            if self._repeats:
                self._look_again()
        finally:
            self.release()

    def event(self, event: msgspec.Struct) -> None:
        """On the loop's thread. It is put into words with the others when they are written, which is sooner done than
        one now and one then."""
        waiting = self._waiting
        waiting.append((event, time.time()))
        if len(waiting) == 1 or len(waiting) >= MAX_WAITING_LINES:
            self._flush_soon(at_once=False)

    def flush(self) -> None:
        self.acquire()
        try:
            waiting, self._waiting = self._waiting, []
            lines = [line if isinstance(line, str) else self._form.event(*line) for line in waiting]
            if lines:
                self.backlog.write("\n".join(lines) + "\n")
        finally:
            self.release()

    def _missing(self, num: int) -> str:
        text = f"log: {num} lines before this one are lost: nobody read them in time, or they could not be written"
        record = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return self._form.format(logging.makeLogRecord(record)) + "\n"

    def _add(self, line: str, at_once: bool) -> None:
        self._waiting.append(line)
        self._flush_soon(at_once)

    def _flush_soon(self, at_once: bool) -> None:
        """Somebody has come to those that wait."""
        num_waiting = len(self._waiting)
        if at_once or num_waiting >= MAX_WAITING_LINES:
            self.flush()
        elif num_waiting == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
            except RuntimeError:  # another thread, or before the loop and after it
                self.flush()


_handler: Lines | None = None
_events: Lines | None = None
_usual = "info"
"""The level of the settings."""


def tell(event: msgspec.Struct) -> None:
    """Logs an event at the level of information."""
    if _events is not None:
        _events.event(event)


def num_lost_lines() -> int:
    """Of the log, since start."""
    return 0 if _handler is None else _handler.backlog.num_lost


def say(sentence: str) -> None:
    """A line to whoever started this, as it stands. It keeps its place among those of the log."""
    if _handler is None:
        print(sentence, file=sys.stderr, flush=True)
    else:
        _handler.say(sentence)


def log_to_stderr(config: settings.Log) -> None:
    """Everything that is logged, from ``config.level`` up, and events from "info" down."""
    global _handler, _usual
    # Nobody prints them, and finding them costs more than the rest of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    _handler = Lines(sys.stderr, Fields(config.format == "json"))
    _usual = config.level
    logging.root.handlers[:] = [_handler]
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until somebody hears it: else it ends the process
    log_from(None)


def log_from(level: str | None) -> None:
    """Up; None: from that of the settings."""
    global _events
    logging.root.setLevel((level or _usual).upper())
    _events = _handler if log.isEnabledFor(logging.INFO) else None
