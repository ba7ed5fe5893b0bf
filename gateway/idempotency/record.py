"""What the client of one request is sent, written down as it is said: any number of clients read along, or later."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from aiohttp import web

from gateway.head import Whole
from gateway.reply.headless import Script

MOMENT_S = 0.05
"""Those who read along have so long to pass on what was said, now and then."""


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="reply-1"):
    """A whole answer as it was sent. The tag is the version of this shape."""

    asked: bytes
    """The digest of what was asked."""
    request_id: str
    is_stream: bool
    body: bytes
    """JSON, or all events."""


class Record(Script):
    """What one request is answered, in pieces as they were said."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id
        """Of the request that was, or is, answered."""
        self.is_stream = False
        self.has_failed = False
        """A stream that ended with an error."""
        self.error: Exception | None = None
        """There is no answer, and why."""
        self.num_readers = 0
        """Clients that read along."""
        self._num_passed_on = 0
        """Pieces that have left for a client, of the one who is furthest."""
        self._passed_on = asyncio.Event()

    # Whoever answers

    async def open(self) -> web.StreamResponse:
        if self.response is None:
            self.is_stream = True
            self._move()
        return await super().open()

    async def write(self, events: bytes) -> bool:
        await self.open()
        self.said.append(events)
        self._move()
        return False

    @property
    def is_flushed(self) -> bool:
        return self._num_passed_on == len(self.said)

    async def flush(self) -> None:
        """Until a client has it all, or for a moment: nobody is waited for. Whoever comes again is told all of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                while self.num_readers and not self.is_flushed:
                    await self._passed_on.wait()

    async def end(self, events: bytes) -> web.StreamResponse:
        response = await self.open()
        self.said.append(events)
        return response

    async def fail(self, event: bytes) -> web.StreamResponse:
        self.has_failed = True
        return await self.end(event)

    def finish(self, response: web.StreamResponse) -> None:
        """All is said. ``response``: what the handler returned; a body comes whole."""
        if isinstance(response, Whole):
            self.said.append(response.body)
        self.is_over = True
        self._move()

    def give_up(self, error: Exception) -> None:
        self.error = error
        self.is_over = True
        self._move()

    def repeat(self, recorded: Recorded) -> None:
        """What was recorded elsewhere, or before."""
        self.request_id, self.is_stream = recorded.request_id, recorded.is_stream
        self.said = [recorded.body]
        self.is_over = True
        self._move()

    def recorded(self, asked: bytes) -> Recorded:
        return Recorded(asked, self.request_id, self.is_stream, b"".join(self.said))

    # Whoever reads

    async def begun(self) -> None:
        """Until its form is known: a stream that is open, or all of it. Raises ``error``."""
        while not self.is_stream and not self.is_over:
            await self._moved.wait()
        if self.error is not None and not self.is_stream:
            raise self.error

    def passed_on(self, num_pieces: int) -> None:
        """The first pieces have left for a client."""
        if num_pieces > self._num_passed_on:
            self._num_passed_on = num_pieces
            self._passed_on.set()
            self._passed_on = asyncio.Event()
