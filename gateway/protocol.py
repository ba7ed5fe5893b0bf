"""A connection. What is said to a client whose bytes cannot be read as HTTP is the error object, as to everybody else,
where aiohttp would answer in plain text and log a traceback."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway import errors, failures, head, open_files
from gateway.telemetry import Ended, about, tell

_NO_HEADERS, _ROOT = CIMultiDictProxy(CIMultiDict[str]()), URL("/")

_data_received = web.RequestHandler.data_received

log = logging.getLogger("penstock.gateway")


class Unread(web.Response):
    """The answer to what is no request. aiohttp takes such for HTTP/1.0, which most are not."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """See StreamResponse."""
        message = RawRequestMessage(
            request.method, "/", HttpVersion11, _NO_HEADERS, (), True, None, False, False, _ROOT
        )
        loop = asyncio.get_running_loop()
        asked = web.BaseRequest(message, request.content, request.protocol, request.writer, request.task, loop)
        return await super().prepare(asked)


class Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """See RequestHandler, which lets a client take an hour to say what it wants, as one that wants nothing yet."""
        _data_received(self, data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # what came is no whole head
            self._expect_head()

    def _expect_head(self) -> None:
        """All of it by then, or the connection ends."""
        manager, loop = self._manager, self._loop
        assert isinstance(manager, Server)
        due_at = loop.time() + manager.stall_s
        if due_at < self._next_keepalive_close_time:
            self._next_keepalive_close_time = due_at
            if self._keepalive_handle is not None:
                self._keepalive_handle.cancel()
            self._keepalive_handle = loop.call_at(due_at, self._process_keepalive)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """See BaseProtocol. It is called behind every body, mostly of a connection that was never paused: there it
        would parse nothing and tell the transport nothing, which takes 2 us."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    @property
    def is_sending(self) -> bool:
        """Whoever answered is done, and some of the answer is here yet: a file of which its client reads on, a body
        longer than the kernel takes at once, the last that a slow reader has of a stream."""
        transport = self.transport
        if transport is None or self._current_request is not None:
            return False
        return self._request_in_progress or transport.get_write_buffer_size() > 0

    async def _drain_helper(self) -> None:
        """See BaseProtocol, which waits for a client that reads nothing as long as that stays connected, and for which
        one cannot wait twice."""
        transport, manager = self.transport, self._manager
        if transport is None or manager is None:
            raise ConnectionResetError("the client is gone")
        assert isinstance(manager, Server)
        while self._paused:
            waiter = self._drain_waiter
            if waiter is None:
                waiter = self._drain_waiter = self._loop.create_future()
                waiter.add_done_callback(_seen)
            num_bytes = transport.get_write_buffer_size()
            await asyncio.wait([waiter], timeout=manager.stall_s)
            if waiter.done():
                return waiter.result()
            if transport.get_write_buffer_size() >= num_bytes:
                transport.abort()
                raise ConnectionResetError(f"the client read nothing for {manager.stall_s:g} s")
        return None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See RequestHandler; where bytes could not be read there is no path, and a request only by its id."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent")
        noted = request.get(head.HEAD)
        if noted is None:
            noted = request[head.HEAD] = head.Head(None, None, {})
        failure: errors.GatewayError
        response: web.Response
        if status < 500:
            first = (message or "").strip().partition("\n")[0].rstrip(":")
            failure = errors.InvalidRequest(f"The request could not be read as HTTP: {first}")
            response = Unread(status=failure.status, body=failures.body(failure), content_type="application/json")
            tell(Ended(noted.request_id, None, None, request.method, None, failure.status, 0.0))
        else:
            log.error("a connection failed", exc_info=exc, extra=about(noted.request_id))
            failure = errors.InternalError()
            response = failures.shaped(failure, noted.request_id)
        head.add_headers(request, response)
        response.force_close()
        return response


def _seen(waiter: asyncio.Future[None]) -> None:
    """Whoever waits for a client that goes is cancelled and asks no more why, which asyncio would log as an error."""
    if not waiter.cancelled():
        waiter.exception()


class Timed(Protocol):
    """A connection that notes when a request's first bytes came, which may be a while before its handler runs."""

    __slots__ = ("received_at",)

    received_at: float
    """Monotonic seconds; 0: they have not come, or have been taken note of. (Those of a request that came together
    with the one before it never have: it has waited for nothing but its turn.)"""

    def data_received(self, data: bytes) -> None:
        # What comes while a request is in progress is the rest of it.
        if not self._request_in_progress and not self.received_at:
            self.received_at = monotonic()
        Protocol.data_received(self, data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.received_at = 0.0
        super().connection_made(transport)


class Server(web.Server):
    """Makes one for each connection. aiohttp has no other seam for it: an instance of its own becomes one of these."""

    stall_s: float
    """How long a client may read nothing; whoever makes a server sets it, and the next one."""
    files: open_files.Watch

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """See web.Server."""
        super().connection_made(handler, transport)
        self.files.opened(transport.get_extra_info("socket").fileno())

    def is_sending(self) -> bool:
        """Whether any of its connections is."""
        return any(isinstance(connection, Protocol) and connection.is_sending for connection in self.connections)

    def __call__(self) -> web.RequestHandler:
        connection = super().__call__()
        connection.__class__ = Protocol
        return connection


class TimedServer(Server):
    """As ``Server``, of connections that are ``Timed``."""

    def __call__(self) -> web.RequestHandler:
        return Timed(self, loop=self._loop, **self._kwargs)
