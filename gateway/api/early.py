"""Streams that are opened before there is anything to send, as their model has to be loaded first: their clients are
kept waiting and not in doubt, and proxies, which cut silent connections, hear something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway import failures
from gateway.errors import GatewayError
from gateway.head import HEAD, HUNG_UP
from gateway.house import Gateway
from gateway.openai import ChatRequest, CompletionRequest
from gateway.reply.events import OUTLET, EventStream, Outlet

EARLY = web.RequestKey("early", Outlet)
"""Key of the outlet that may be opened while a request waits for its model."""


def is_out(gw: Gateway, model: str) -> bool:
    """Workers here answer for it, and it has to be loaded before they can."""
    return gw.dispatch.serves(model) and gw.dispatch.ready(model) is None


def patient(
    gw: Gateway,
    request: web.Request,
    call: ChatRequest | CompletionRequest,
    answer: Awaitable[web.StreamResponse],
    failed: Callable[[GatewayError], bytes] = failures.event,
) -> Awaitable[web.StreamResponse]:
    """``answer``, whose client may wait for the model. ``failed``: the end of a stream in its dialect."""
    if not call.stream or not is_out(gw, call.model):
        return answer
    outlet = request[OUTLET] = request[EARLY] = request.get(OUTLET) or EventStream(
        request, gw.settings.server, gw.clock
    )
    return streamed(request, outlet, answer, failed)


async def streamed(
    request: web.Request,
    outlet: Outlet,
    answer: Awaitable[web.StreamResponse],
    failed: Callable[[GatewayError], bytes],
    is_told: Callable[[], bool] = lambda: False,
) -> web.StreamResponse:
    """What fails until there is something to send has its own status as long as nothing is sent; afterwards it is the
    stream's end, unless that has been told already."""
    noted = request[HEAD]
    async with outlet:
        try:
            return await answer
        except ConnectionResetError:
            return outlet.response or web.Response(status=HUNG_UP)
        except Exception as error:
            if outlet.response is None or is_told():
                raise
            failure = failures.described(error, noted.request_id, noted.trace_if_it_fails)
            noted.failed(failure)
            return await request[OUTLET].fail(failed(failure))
