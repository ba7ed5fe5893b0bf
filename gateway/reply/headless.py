"""Outlets that have no connection of their own: there is no head to send, and what becomes of their events is theirs to
say."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self

from aiohttp import web


class Headless(ABC):
    """An ``Outlet`` but for where it writes to."""

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def open(self) -> web.StreamResponse:
        """There are no headers to send."""
        if self.response is None:
            self.response = web.StreamResponse()
        return self.response

    @abstractmethod
    async def write(self, events: bytes) -> bool: ...

    async def end(self, events: bytes) -> web.StreamResponse:
        await self.write(events)
        return await self.open()

    async def fail(self, event: bytes) -> web.StreamResponse:
        return await self.end(event)


class Script(Headless):
    """One that keeps what is said, for any number of clients who read along, or later. Nobody hangs up, and nobody is
    waited for. It holds at most what the answer may be long."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes] = []
        self.is_over = False
        """All is said."""
        self._moved = asyncio.Event()

    async def more(self, num_read: int) -> list[bytes]:
        """What was said after the first ``num_read``; waits for at least one, empty when there are no more."""
        while len(self.said) <= num_read and not self.is_over:
            await self._moved.wait()
        return self.said[num_read:]

    def _move(self) -> None:
        """There is more for those who read."""
        self._moved.set()
        self._moved = asyncio.Event()
