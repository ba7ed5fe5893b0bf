"""What goes on without a connection, and has its trace all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web

from gateway import errors
from gateway.head import HEAD, HUNG_UP
from gateway.house import Gateway


@contextlib.contextmanager
def behind(gw: Gateway, request: web.Request) -> Iterator[None]:
    """What this request has left to be done behind its answer: a span of its own, below the request's."""
    tracing, noted = gw.tracing, request[HEAD]
    if tracing is None:
        yield
        return
    behind = request[HEAD] = tracing.beside(noted, "background")
    status = 200
    try:
        yield
    except asyncio.CancelledError:
        status = HUNG_UP
        raise
    except Exception as error:
        failure = error if isinstance(error, errors.GatewayError) else errors.InternalError()
        behind.failed(failure)
        status = failure.status
        raise
    finally:
        noted.is_told = behind.is_told
        tracing.end(behind, request, status)
