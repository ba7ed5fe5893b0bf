"""The body of a request: whole, JSON if it says what it is, and waited for as long as it keeps coming."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from aiohttp import StreamReader, hdrs, web

from gateway.errors import BodyTimeout, UnsupportedMediaType
from gateway.head import HEAD
from gateway.openai.duplicate_keys import LONG_BYTES
from gateway.unpacking import encoding_of, unpacked

if TYPE_CHECKING:
    from gateway.house import Gateway

T = TypeVar("T")

PIECE_BYTES = 64 << 10
"""Of a body, that have to come within ``server.stall_s``: who sends a byte now and then would else be waited for for
days."""

_beside = ThreadPoolExecutor(1, thread_name_prefix="bodies")


async def body_of(gw: Gateway, request: web.Request) -> bytes:
    """The body, which has to be JSON if it says what it is, unpacked. Raises UnsupportedMediaType, InvalidRequest and
    BodyTimeout; aiohttp refuses what is too large."""
    _check_type(request)
    encoding = encoding_of(request.headers)
    try:
        async with asyncio.timeout(gw.settings.server.stall_s):
            body = await request.read()
    except TimeoutError:
        raise BodyTimeout() from None
    return body if encoding is None else await _unpacked(body, encoding, request.client_max_size)


async def taken_body_of(gw: Gateway, request: web.Request, of_any_type: bool = False) -> bytes:
    """As ``body_of``, for one caller: the request has it no more. What came together with its head is there by now,
    and needs none of the ways that aiohttp waits for more. ``of_any_type``: it may say that it is something else."""
    request[HEAD].parse_at = time.monotonic()
    if not of_any_type:
        _check_type(request)
    encoding = encoding_of(request.headers)
    content, max_bytes = request.content, request.client_max_size
    if not content.is_eof():
        if (request.content_length or 0) > max_bytes:  # nobody need wait for what is refused anyway
            raise web.HTTPRequestEntityTooLarge(max_bytes)
        body = await _arriving(content, max_bytes, gw.settings.server.stall_s)
    else:
        body = content.read_nowait()
        if len(body) > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes)
    return body if encoding is None else await _unpacked(body, encoding, max_bytes)


async def _arriving(content: StreamReader, max_bytes: int, stall_s: float) -> bytes:
    """What comes while enough of it does: every ``PIECE_BYTES`` give it ``stall_s`` more. Raises BodyTimeout."""
    body, due_bytes, now = bytearray(), PIECE_BYTES, asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(stall_s) as patience:
            while chunk := await content.readany():
                body += chunk
                if len(body) > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes)
                if len(body) >= due_bytes:
                    due_bytes = len(body) + PIECE_BYTES
                    patience.reschedule(now() + stall_s)
    except TimeoutError:
        raise BodyTimeout() from None
    return bytes(body)


async def _unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Beside the event loop, since a short one may become a long one."""
    return await asyncio.get_running_loop().run_in_executor(_beside, unpacked, body, encoding, max_bytes)


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """What ``parse`` makes of it; of a long one beside the event loop, one at a time. Raises what ``parse`` raises."""
    if len(body) <= LONG_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_beside, parse, body)


def _check_type(request: web.Request) -> None:
    declared = request.headers.get(hdrs.CONTENT_TYPE, "application/json")
    if declared != "application/json" and request.content_type != "application/json":  # it may name a charset
        raise UnsupportedMediaType(f"Unsupported content type '{request.content_type}': send application/json")
