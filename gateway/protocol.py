"""A connection. What is said to a client whose bytes cannot be read as HTTP is the error object, as to everybody else,
where aiohttp would answer in plain text and log a traceback."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from aiohttp import hdrs, web
from aiohttp.http_exceptions import ContentEncodingError

from gateway import errors, head

ENCODINGS = frozenset(("identity", "gzip", "deflate", "br"))
"""That a body may have come in. It is unpacked as it is read, and what is longer than ``server.max_body_bytes`` then is
refused no less."""
UNKNOWN_ENCODING = f"Unsupported content encoding: send one of {', '.join(sorted(ENCODINGS))}"

log = logging.getLogger("penstock.gateway")


class Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """See BaseProtocol. It is called behind every body, mostly of a connection that was never paused: there it
        would parse nothing and tell the transport nothing, which takes 2 us."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See RequestHandler; where bytes could not be read there is no path, and no request."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent")
        failure: errors.GatewayError
        if isinstance(exc, ContentEncodingError) and exc.message.rpartition(" ")[2] not in ENCODINGS:
            failure = errors.UnsupportedMediaType(UNKNOWN_ENCODING)
        elif status < 500:
            first = (message or "").strip().partition("\n")[0]
            failure = errors.InvalidRequest(f"The request could not be read as HTTP: {first}")
        else:
            log.error("a connection failed", exc_info=exc)
            failure = errors.InternalError()
        response = errors.shaped(failure, "")
        response.headers[hdrs.SERVER] = head.SERVER
        response.force_close()
        return response


_data_received = Protocol.data_received


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
        _data_received(self, data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.received_at = 0.0
        super().connection_made(transport)


class Server(web.Server):
    """Makes one for each connection. aiohttp has no other seam for it: an instance of its own becomes one of these."""

    __slots__ = ()

    def __call__(self) -> web.RequestHandler:
        connection = super().__call__()
        connection.__class__ = Protocol
        return connection


class TimedServer(web.Server):
    """As ``Server``, of connections that are ``Timed``."""

    __slots__ = ()

    def __call__(self) -> web.RequestHandler:
        return Timed(self, loop=self._loop, **self._kwargs)
