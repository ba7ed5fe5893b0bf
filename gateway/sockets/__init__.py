"""WebSockets of /v1/responses: how many there are, and that they end with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from aiohttp import web

from gateway.places import Places
from policies import settings


class Open(Protocol):
    """A connection."""

    def look(self) -> None:
        """Something may have changed that ends it."""


class Sockets:
    """All that are open here."""

    def __init__(self, config: settings.Responses, aside: Callable[[], AbstractContextManager[None]]) -> None:
        """``aside``: while this lasts, nobody waits for the request that is being answered."""
        self._places = Places(
            config.max_sockets,
            config.max_sockets_per_tenant,
            "Too many connections are open. Please try again.",
            "This project has {} connections already; close one.",
            retry_after_s=5.0,
        )
        self._aside = aside
        self._open: list[Open] = []
        self._left = asyncio.Event()
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        """Whoever answers all requests; None: nobody does yet."""

    @property
    def num_open(self) -> int:
        return self._places.num_taken

    @contextlib.contextmanager
    def room(self, tenant_id: str) -> Iterator[None]:
        """For one more. Nobody waits for it, but for the responses that are asked for over it. Raises as
        ``Places.one`` does."""
        try:
            with self._places.one(tenant_id), self._aside():
                yield
        finally:
            self._left.set()

    @contextlib.contextmanager
    def watched(self, connection: Open) -> Iterator[None]:
        """While this lasts, it is told when the server goes."""
        self._open.append(connection)
        try:
            yield
        finally:
            self._open.remove(connection)

    def close(self) -> None:
        """The server goes: they end as soon as nothing is being answered over them."""
        for connection in self._open:
            connection.look()

    async def all_left(self) -> None:
        """Until none is open."""
        while self.num_open:
            self._left.clear()
            await self._left.wait()
