"""From responses to the WebSocket that they were asked for over."""

from __future__ import annotations

import asyncio

from aiohttp import WSMsgType, web

from gateway.reply.events import Pressed
from gateway.reply.headless import Headless
from gateway.sockets.events import frames
from policies import settings


class Way(Pressed):
    """A connection's way out, which its responses share."""

    def __init__(self, request: web.Request, socket: web.WebSocketResponse, limits: settings.Server) -> None:
        """``request``: the one that the socket answers."""
        super().__init__(request, limits)
        self._socket = socket
        self._turn = asyncio.Lock()
        self._limit_ahead()

    async def send(self, *messages: bytes) -> bool:
        """One behind the other; waits while the client has more than the limit to read. Whether all of it has left this
        process. Raises ConnectionResetError when the client is gone, or was given up."""
        async with self._turn:
            for message in messages:
                await self._socket.send_frame(message, WSMsgType.TEXT)
            if self._protocol.writing_paused:
                await self._read_by_client()
        return self.is_flushed

    async def flush(self) -> None:
        async with self._turn:
            await super().flush()

    def cut(self) -> None:
        """The client is given up."""
        if self._transport is not None:
            self._transport.abort()


class Lane(Headless):
    """One response's events on the way."""

    def __init__(self, way: Way, stream_id: str | None) -> None:
        super().__init__()
        self._way = way
        self._stream_id = stream_id

    async def write(self, events: bytes) -> bool:
        await self.open()
        return await self._way.send(*frames(events, self._stream_id))

    @property
    def is_flushed(self) -> bool:
        return self._way.is_flushed

    async def flush(self) -> None:
        await self._way.flush()
