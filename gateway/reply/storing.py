"""A stream whose answer is stored before its client has heard the end of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.reply.events import Outlet

Store = Callable[[bytes], Awaitable[bytes]]


class Storing:
    """Another ``Outlet``, and what has to be done before its last events."""

    def __init__(self, outlet: Outlet, store: Store, store_failed: Store | None = None) -> None:
        """``store``: stores the answer, and gives its last events as they are then; ``store_failed``: that of a stream
        that failed, where such a one is stored."""
        self._outlet = outlet
        self._store = store
        self._store_failed = store_failed

    @property
    def response(self) -> web.StreamResponse | None:
        return self._outlet.response

    async def __aenter__(self) -> Storing:
        await self._outlet.__aenter__()
        return self

    async def __aexit__(self, *of_what: object) -> None:
        await self._outlet.__aexit__(*of_what)

    async def open(self) -> web.StreamResponse:
        return await self._outlet.open()

    async def write(self, events: bytes) -> bool:
        return await self._outlet.write(events)

    @property
    def is_flushed(self) -> bool:
        return self._outlet.is_flushed

    async def flush(self) -> None:
        await self._outlet.flush()

    async def end(self, events: bytes) -> web.StreamResponse:
        return await self._outlet.end(await self._store(events))

    async def fail(self, event: bytes) -> web.StreamResponse:
        return await self._outlet.fail(event if self._store_failed is None else await self._store_failed(event))
