"""Where the events of a response in the background go: into a log that any number of clients read along."""

from __future__ import annotations

from aiohttp import web

from gateway.reply.headless import Script
from gateway.responses.events import split


class Log(Script):
    """All events of one response in the background, by their sequence numbers. The last ones are held back until it is
    closed."""

    def __init__(self) -> None:
        super().__init__()
        self._last = b""

    async def write(self, events: bytes) -> bool:
        self.add(events)
        return True

    @property
    def is_flushed(self) -> bool:
        return True

    async def flush(self) -> None:
        return None

    async def end(self, events: bytes) -> web.StreamResponse:
        self._last += events
        return await self.open()

    def add(self, events: bytes) -> None:
        if events:
            self.said += split(events)
            self._move()

    def take_last(self) -> list[bytes]:
        """The events held back, to be written down before ``close``."""
        return split(self._last)

    def close(self) -> None:
        """Whoever reads is told the last events."""
        self.said += split(self._last)
        self._last = b""
        self.is_over = True
        self._move()
