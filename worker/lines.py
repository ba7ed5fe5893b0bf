"""What a worker says on standard error: in the shape, and from the level up, of its gateway's log."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

from policies.observing import Log

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


def log_to_stderr(config: Log, who: str) -> None:
    """Of libraries nothing below "info"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(who, config.format == "json"))
    logging.root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.level.upper()]
    logging.root.setLevel(max(level, logging.INFO))
    for ours in ("penstock.worker", "worker"):
        logging.getLogger(ours).setLevel(level)


def tell_operator(sentence: str) -> None:
    """Why it ends. It is one line of its own, unless the log has objects."""
    if any(isinstance(each.formatter, Lines) and each.formatter.as_json for each in logging.root.handlers):
        log.error("%s", sentence)
    else:
        print(f"penstock worker: {sentence}", file=sys.stderr)
