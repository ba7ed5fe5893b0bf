"""WebSockets of /v1/responses: how many there are, and that they end with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from aiohttp import web

from gateway import errors
from policies import settings


class Open(Protocol):
    """A connection."""

    def look(self) -> None:
        """Something may have changed that ends it."""


class Sockets:
    """All that are open here."""

    def __init__(self, config: settings.Responses, aside: Callable[[], AbstractContextManager[None]]) -> None:
        """``aside``: while this lasts, nobody waits for the request that is being answered."""
        self._config = config
        self._aside = aside
        self._open: list[Open] = []
        self._tenants: list[str] = []
        """One for each."""
        self._left = asyncio.Event()
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        """Whoever answers all requests; None: nobody does yet."""

    @property
    def num_open(self) -> int:
        return len(self._tenants)

    @contextlib.contextmanager
    def room(self, tenant_id: str) -> Iterator[None]:
        """For one more. Nobody waits for it, but for the responses that are asked for over it. Raises QueueFull, and
        RequestsLimited when the tenant has its share."""
        if self.num_open >= self._config.max_sockets:
            raise errors.QueueFull("Too many connections are open. Please try again.", retry_after_s=5.0)
        if (mine := self._tenants.count(tenant_id)) >= self._config.max_sockets_per_tenant:
            raise errors.RequestsLimited(
                f"This project has {mine} connections already; close one.", headers={}, retry_after_s=5.0
            )
        self._tenants.append(tenant_id)
        try:
            with self._aside():
                yield
        finally:
            self._tenants.remove(tenant_id)
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
        while self._tenants:
            self._left.clear()
            await self._left.wait()
