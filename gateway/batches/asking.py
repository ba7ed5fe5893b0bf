"""One line asked: it goes the way of a request that came over HTTP, through the same endpoint, without a connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

from aiohttp import hdrs, web
from multidict import CIMultiDict

from gateway import errors, failures, head, unconnected
from gateway.auth import Caller
from gateway.entrance import Endpoint
from gateway.house import Gateway
from gateway.reply import Keeper

if TYPE_CHECKING:
    from gateway.tracing.tracer import Tracing

HEADERS = CIMultiDict({hdrs.CONTENT_TYPE: "application/json"})


class Asked(NamedTuple):
    """What became of it."""

    request_id: str
    status: int
    body: bytes
    failure: errors.GatewayError | None


async def ask(
    gw: Gateway,
    endpoints: Mapping[str, Endpoint],
    path: str,
    body: bytes,
    caller: Caller,
    keeper: Keeper,
) -> Asked:
    """As whoever made the batch. Never raises but when it is cancelled."""
    request = unconnected.post(path, body, HEADERS, gw.settings.server.max_body_bytes)
    noted = head.begin(request, tracing=gw.tracing)
    noted.caller, noted.keeper, noted.route = caller, keeper, path
    request_id = noted.request_id
    with traced(gw.tracing, request, keeper.batch_id) as became:
        try:
            response = await endpoints[path](gw, request)
        except web.HTTPException as error:
            failure = failures.of_http(error, request)
        except Exception as error:
            failure = failures.described(error, request_id, noted.trace_if_it_fails)
        else:
            became.status = response.status
            said = response.body if isinstance(response, head.Whole | web.Response) else None
            return Asked(request_id, response.status, cast(bytes, said or b"null"), None)
        became.status, became.failure = failure.status, failure
        return Asked(request_id, failure.status, failures.body(failure, is_kept=True), failure)


class Became:
    """What a line is answered; to begin with, nothing."""

    status = head.HUNG_UP
    failure: errors.GatewayError | None = None


@contextlib.contextmanager
def traced(tracing: Tracing | None, request: web.Request, batch_id: str) -> Iterator[Became]:
    """Its own trace, if there are any."""
    became, noted = Became(), request[head.HEAD]
    if tracing is None:
        yield became
        return
    noted.kind, noted.batch = "line", batch_id
    try:
        yield became
    finally:
        if became.failure is not None:
            noted.failed(became.failure)
        tracing.end(noted, request, became.status)
