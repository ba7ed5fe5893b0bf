"""Requests that come by no connection of their own, and go the way of all others: lines of batches, and what is asked
over a WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL


class Nowhere:
    """What such a request has for a connection."""

    ssl_context = peername = sockname = transport = None
    received_at = 0.0


def post(path: str, body: bytes, headers: CIMultiDict[str], max_body_bytes: int, remote: str = "") -> web.Request:
    """All of it is there. ``remote``: the address of whoever asks; to be made in the task that answers it."""
    loop = asyncio.get_running_loop()
    content = StreamReader(BaseProtocol(loop), 1 << 16, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    given = CIMultiDictProxy(headers)
    message = RawRequestMessage(
        hdrs.METH_POST, path, HttpVersion11, given, (), False, None, False, False, URL.build(path=path)
    )
    task, nowhere = cast(Any, asyncio.current_task()), cast(Any, Nowhere())
    return web.Request(message, content, nowhere, nowhere, task, loop, client_max_size=max_body_bytes, remote=remote)
