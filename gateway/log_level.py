"""From which level on the log is told: that of the settings, until the administration asks for another one, which is
set back by itself, or SIGUSR1 for everything. Every process has its own; what is asked of one is asked of all
(``gateways``, ``processes``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Literal, cast

import msgspec

from gateway import telemetry
from gateway.clock import Clock, Timer

Level = Literal["debug", "info", "warning", "error"]

log = logging.getLogger(__name__)

_asked: Level | None = None
_is_switched = False


class Asked(msgspec.Struct, frozen=True):
    """Of all gateways."""

    level: Level
    until: float
    """Unix seconds."""


def level() -> Level:
    """The one that counts."""
    return cast(Level, logging.getLevelName(logging.root.level).lower())


def ask(name: Level | None) -> None:
    """In place of that of the settings; None: no more."""
    global _asked
    _asked = name
    _apply()


def is_switched() -> bool:
    """By ``switch``."""
    return _is_switched


def switch() -> None:
    """Everything is told from now on; or again what was before."""
    global _is_switched
    _is_switched = not _is_switched
    _apply()
    log.warning("log: from %s up", level())


def switch_by_signal(others: Callable[[], Iterable[int]] = tuple) -> None:
    """SIGUSR1 does, while the loop runs. ``others``: processes that are told as well, which have to hear it by now."""

    def heard() -> None:
        switch()
        for pid in others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard)


def _apply() -> None:
    telemetry.log_from("debug" if _is_switched else _asked)


class AskedFor:
    """What the administration asks of this gateway, until it is over."""

    def __init__(self, clock: Clock) -> None:
        self.asked: Asked | None = None
        self._clock = clock
        self._timer: Timer | None = None

    def take(self, asked: Asked | None) -> None:
        """As of now; None: nothing."""
        left_s = 0.0 if asked is None else asked.until - time.time()
        if left_s <= 0:
            asked = None
        if asked == self.asked:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.asked, self._timer = asked, None
        ask(None if asked is None else asked.level)
        if asked is not None:
            self._timer = self._clock.call_later(left_s, lambda: self.take(None))
        log.warning("log: from %s up", level())
