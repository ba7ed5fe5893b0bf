"""Where the events of a response in the background go: into a log that any number of clients read along."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.responses.events import split


class Log:
    """An ``Outlet`` without a client: all events of one response in the background, by their sequence numbers. It holds
    at most what the answer may be long. The last ones are held back until it is closed."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.is_closed = False
        self.response: web.StreamResponse | None = None
        self._last = b""
        self._moved = asyncio.Event()

    # Whoever answers

    async def __aenter__(self) -> Log:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def open(self) -> web.StreamResponse:
        if self.response is None:
            self.response = web.StreamResponse()
        return self.response

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

    async def fail(self, event: bytes) -> web.StreamResponse:
        return await self.end(event)

    def add(self, events: bytes) -> None:
        if events:
            self.events += split(events)
            self._move()

    def take_last(self) -> list[bytes]:
        """The events held back, to be written down before ``close``."""
        return split(self._last)

    def close(self) -> None:
        """Whoever reads is told the last events."""
        self.events += split(self._last)
        self._last = b""
        self.is_closed = True
        self._move()

    # Whoever reads

    async def more(self, num_read: int) -> list[bytes]:
        """The events after the first ``num_read``; waits for at least one, empty when there are no more."""
        while len(self.events) <= num_read and not self.is_closed:
            await self._moved.wait()
        return self.events[num_read:]

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
