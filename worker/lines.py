"""What a worker says on standard error: in the shape, and from the level up, of its gateway's log.

A thread writes it: a step does not wait for whoever reads the log, who may stall."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
import time

import msgspec

from policies.observing import Log

MAX_WAITING = 4096
"""Lines that nobody has read yet."""
LAST_S = 1.0
"""How long a process that ends may go on writing."""

log = logging.getLogger("penstock.worker")


class Lines(logging.Formatter):
    """Time, level, who and what; or the same as a JSON object."""

    def __init__(self, who: str, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        at, level, text = f"{second}.{int(record.msecs):03}Z", record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if not self.as_json:
            return f"{at} {level:7} worker {self._who}: {text}" + (f"\n{trace}" if trace else "")
        line = {"time": at, "level": level, "logger": record.name, "worker": self._who, "message": text}
        return msgspec.json.encode({**line, "trace": trace} if trace else line).decode()


class Aside(logging.Handler):
    """Lines to a file, by a thread. What finds no room is dropped and counted, and the next one that does says so."""

    def __init__(self, descriptor: int, form: Lines) -> None:
        super().__init__()
        self.setFormatter(form)
        self.form = form
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(MAX_WAITING)
        self._num_lost = 0
        """Of which nothing is said yet."""
        threading.Thread(target=self._write_forever, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))

    def say(self, line: str) -> None:
        """As it stands."""
        num_lost = self._num_lost
        if num_lost:
            text = f"{num_lost} lines before this one are lost: nobody read them in time"
            record = {"name": log.name, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
            line = f"{self.form.format(logging.makeLogRecord(record))}\n{line}"
        try:
            self._waiting.put_nowait(line)
            self._num_lost -= num_lost
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """What waits is written, if somebody reads it."""
        waiting = self._waiting
        with waiting.all_tasks_done:
            waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, LAST_S)
        super().close()

    def _write_forever(self) -> None:
        while True:
            data = f"{self._waiting.get()}\n".encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # nobody reads it any more
                while data:
                    try:
                        data = data[os.write(self._descriptor, data) :]
                    except BlockingIOError:  # another process has made it so, for all who have it
                        select.select([], [self._descriptor], [])
            self._waiting.task_done()


def log_to_stderr(config: Log, who: str) -> None:
    """Of libraries nothing below "info"."""
    logging.root.handlers[:] = [Aside(2, Lines(who, config.format == "json"))]
    level = logging.getLevelNamesMapping()[config.level.upper()]
    logging.root.setLevel(max(level, logging.INFO))
    for ours in ("penstock.worker", "worker"):
        logging.getLogger(ours).setLevel(level)


def tell_operator(sentence: str) -> None:
    """Why it ends. It is one line of its own, unless the log has objects."""
    aside = next((each for each in logging.root.handlers if isinstance(each, Aside)), None)
    if aside is None:
        print(f"penstock worker: {sentence}", file=sys.stderr)
    elif aside.form.as_json:
        log.error("%s", sentence)
    else:
        aside.say(f"penstock worker: {sentence}")
