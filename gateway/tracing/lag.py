"""How late the event loop is: by how much a timer that is always there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gateway.clock import Clock, Timer

TICK_S = 0.05


class Lag:
    """As last measured."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timer: Timer | None = None
        self._due_at = 0.0
        self.ms = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """While this lasts."""
        self._wait()
        try:
            yield
        finally:
            assert self._timer is not None
            self._timer.cancel()

    def _wait(self) -> None:
        self._due_at = self._clock.now() + TICK_S
        self._timer = self._clock.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self.ms = max(0.0, 1e3 * (self._clock.now() - self._due_at))
        self._wait()
