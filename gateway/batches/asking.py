"""One line asked: it goes the way of a request that came over HTTP, through the same endpoint, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway import errors, head
from gateway.auth import CALLER, Caller
from gateway.entrance import Endpoint
from gateway.house import Gateway
from gateway.reply import KEPT, Keeper

HEADERS = CIMultiDictProxy(CIMultiDict({hdrs.CONTENT_TYPE: "application/json"}))


class Asked(NamedTuple):
    """What became of it."""

    request_id: str
    status: int
    body: bytes
    failure: errors.GatewayError | None


class Nowhere:
    """What a request has for a connection that came by none."""

    ssl_context = peername = sockname = transport = None


async def ask(
    gw: Gateway,
    endpoints: Mapping[str, Endpoint],
    path: str,
    body: bytes,
    caller: Caller,
    keeper: Keeper,
) -> Asked:
    """As whoever made the batch. Never raises but when it is cancelled."""
    request = _request(path, body, gw.settings.server.max_body_bytes)
    head.begin(request)
    request[CALLER], request[KEPT] = caller, keeper
    request_id = request[head.HEAD].request_id
    try:
        response = await endpoints[path](gw, request)
    except web.HTTPException as error:
        failure = errors.of_http(error, request)
    except Exception as error:
        failure = errors.described(error, request_id)
    else:
        said = response.body if isinstance(response, head.Whole | web.Response) else None
        return Asked(request_id, response.status, cast(bytes, said or b"null"), None)
    return Asked(request_id, failure.status, errors.body(failure), failure)


def _request(path: str, body: bytes, max_body_bytes: int) -> web.Request:
    loop = asyncio.get_running_loop()
    content = StreamReader(BaseProtocol(loop), 1 << 16, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    message = RawRequestMessage(
        hdrs.METH_POST, path, HttpVersion11, HEADERS, (), False, None, False, False, URL.build(path=path)
    )
    task = asyncio.current_task()
    nowhere: Any = Nowhere()
    return web.Request(
        message, content, nowhere, nowhere, cast(Any, task), loop, client_max_size=max_body_bytes, remote=""
    )
