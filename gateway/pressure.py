"""How busy the event loop is, by how late its timers are, and how long streams therefore wait for more tokens.

An idle gateway sends a token as it comes. A busy one would spend most of its time on chunks of one token; there each
stream's chunks are a few milliseconds apart, and what comes meanwhile leaves together. The text is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gateway.clock import Clock, Timer

TICK_S = 0.02
BUSY_S = 0.002
"""Timers that are so late on average mean that work waits. (A loop's own timers are up to a millisecond late.)"""
NEW = 0.25
"""Weight of the newest measurement."""


class Pressure:
    """Measured only while somebody streams."""

    def __init__(self, clock: Clock, hold_s: float) -> None:
        """``hold_s``: between two chunks of a stream while it is busy."""
        self._clock = clock
        self._busy_hold_s = hold_s
        self._num_streams = 0
        self._timer: Timer | None = None
        self._due_at = 0.0
        self._late_s = 0.0
        self.hold_s = 0.0
        """So long a stream waits now after a chunk before it sends the next."""

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """One more stream, for as long as this lasts."""
        self._num_streams += 1
        if self._timer is None and self._busy_hold_s:
            self._wait()
        try:
            yield
        finally:
            self._num_streams -= 1

    def _wait(self) -> None:
        self._due_at = self._clock.now() + TICK_S
        self._timer = self._clock.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._late_s += NEW * (self._clock.now() - self._due_at - self._late_s)
        if self._num_streams:
            self.hold_s = self._busy_hold_s if self._late_s > BUSY_S else 0.0
            self._wait()
        else:
            self._timer, self._late_s, self.hold_s = None, 0.0, 0.0
