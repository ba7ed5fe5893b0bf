"""A stream of events to one client: opened late, kept alive, and never further ahead of its reader than the settings
allow."""

from __future__ import annotations

import asyncio
from typing import Protocol, Self, cast

from aiohttp import web
from aiohttp.http import StreamWriter

from gateway import head, openai
from gateway.clock import Clock, Timer
from policies import settings


class Outlet(Protocol):
    """Where a stream's events go."""

    @property
    def response(self) -> web.StreamResponse | None:
        """None until the headers are out: a failure may still have a status of its own."""

    async def open(self) -> web.StreamResponse:
        """Sends the headers, once."""

    async def write(self, events: bytes) -> bool:
        """Sends, and waits while the client has more than the limit to read. Whether it ``is_flushed``.

        Raises ConnectionResetError when the client is gone, or was given up because it read nothing for so long.
        """

    @property
    def is_flushed(self) -> bool:
        """All that was written has left this process."""

    async def flush(self) -> None:
        """Until it has. Raises ConnectionResetError as ``write`` does."""

    async def end(self, events: bytes) -> web.StreamResponse:
        """Sends the last events."""

    async def fail(self, event: bytes) -> web.StreamResponse:
        """Sends the last event, an error."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


OUTLET = web.RequestKey("outlet", Outlet)
"""Key of where a request's events go if not to its own client."""


class Pressed:
    """A connection that is written to no further ahead of its reader than the settings allow."""

    def __init__(self, request: web.Request, limits: settings.Server) -> None:
        self._request = request
        self._limits = limits
        self._protocol = request.protocol
        self._writer = cast(StreamWriter, request.writer)
        self._transport = request.transport

    def _limit_ahead(self) -> None:
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=self._limits.max_stream_buffer_bytes)

    @property
    def is_flushed(self) -> bool:
        """All that was written has left this process."""
        return self._transport is not None and not self._transport.get_write_buffer_size()

    async def flush(self) -> None:
        """Until it has. Raises ConnectionResetError when the client is gone, or was given up."""
        transport = self._transport
        if transport is None or not transport.get_write_buffer_size():
            return
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.set_write_buffer_limits(high=0)  # so that it counts as full until it is empty
        try:
            if self._protocol.writing_paused:
                await self._read_by_client()
        finally:
            if not transport.is_closing():
                self._limit_ahead()

    async def _read_by_client(self) -> None:
        """Until there is room again. Raises ConnectionResetError as ``flush`` does."""
        if self._request.transport is None:
            raise ConnectionResetError("the client is gone")
        await self._writer.drain()


class EventStream(Pressed):
    """An ``Outlet``: the response of one streaming request. Leaving it stops the heartbeat."""

    def __init__(
        self,
        request: web.Request,
        limits: settings.Server,
        clock: Clock,
        content_type: str = "text/event-stream; charset=utf-8",
        keep_alive: bytes = openai.KEEP_ALIVE,
    ) -> None:
        super().__init__(request, limits)
        self._clock = clock
        self._content_type = content_type
        self._keep_alive = keep_alive
        self._response: web.StreamResponse | None = None
        self._is_chunked = False
        """The head is out, and chunks follow it (HTTP/1.1)."""
        self._timer: Timer | None = None
        self._num_writes = 0
        self._num_writes_before = 0
        self._beat: asyncio.Task[None] | None = None

    @property
    def response(self) -> web.StreamResponse | None:
        return self._response

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    async def open(self) -> web.StreamResponse:
        if self._response is not None:
            return self._response
        self._limit_ahead()
        response = web.StreamResponse(
            headers={
                "content-type": self._content_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        head.add_headers(self._request, response)
        await response.prepare(self._request)
        self._response = response
        self._timer = self._clock.call_later(self._limits.heartbeat_s, self._tick)
        return response

    async def write(self, events: bytes) -> bool:
        if self._response is None:
            await self.open()
        self._num_writes += 1
        transport = self._transport
        if not self._is_chunked or transport is None:
            # Without aiohttp's own wait for the client, which has no end.
            await self._writer.write(events, drain=False)
            self._is_chunked = self._writer.chunked  # and the head is out
        elif transport.is_closing():
            raise ConnectionResetError("the client is gone")
        else:  # as aiohttp would, after a dozen questions that have one answer here
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        if self._protocol.writing_paused:
            await self._read_by_client()
        return transport is not None and not transport.get_write_buffer_size()

    async def flush(self) -> None:
        if self._response is not None:
            await super().flush()

    async def end(self, events: bytes) -> web.StreamResponse:
        response = self._response or await self.open()
        transport = self._request.transport
        if (
            transport is not None
            and transport.get_write_buffer_size() + len(events) >= self._limits.max_stream_buffer_bytes
        ):
            await self.write(events)
            events = b""
        await response.write_eof(events)
        return response

    async def fail(self, event: bytes) -> web.StreamResponse:
        return await self.end(event)

    def _tick(self) -> None:
        """Nothing was sent since the last tick: send a comment."""
        self._timer = self._clock.call_later(self._limits.heartbeat_s, self._tick)
        if self._num_writes == self._num_writes_before and not self._protocol.writing_paused:
            self._beat = asyncio.ensure_future(self._comment())
        self._num_writes_before = self._num_writes

    async def _comment(self) -> None:
        try:
            await self._writer.write(self._keep_alive, drain=False)
        except ConnectionResetError:  # whoever writes the answer hears of it as well
            return
