"""What is said to a client whose bytes cannot be read as HTTP: the error object, as to everybody else, where aiohttp
would answer in plain text and log a traceback."""

from __future__ import annotations

import logging

from aiohttp import web

from gateway import errors

log = logging.getLogger("penstock.gateway")


class Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ()

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
        if status < 500:
            first = (message or "").strip().partition("\n")[0]
            failure = errors.InvalidRequest(f"The request could not be read as HTTP: {first}")
        else:
            log.error("a connection failed", exc_info=exc)
            failure = errors.InternalError()
        response = errors.shaped(failure, "")
        response.force_close()
        return response


class Server(web.Server):
    """Makes one for each connection. aiohttp has no other seam for it: an instance of its own becomes one of these."""

    __slots__ = ()

    def __call__(self) -> web.RequestHandler:
        connection = super().__call__()
        connection.__class__ = Protocol
        return connection
