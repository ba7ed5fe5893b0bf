"""The gateway's clock: monotonic instants and the loop's timers. Tests hand in one that they move themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None: ...


class Clock:
    """Instants are monotonic seconds. (uvloop's own ``loop.time`` moves in whole milliseconds, once an iteration.)"""

    now = staticmethod(time.monotonic)
    """Itself, and no function around it: a request asks about ten times."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Calls once, ``delay_s`` from now, unless cancelled before."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.Event()
        timer = self.call_later(delay_s, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()
