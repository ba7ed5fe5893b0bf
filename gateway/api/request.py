"""What the endpoints ask of a request before they submit it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from aiohttp import StreamReader, hdrs, web
from multidict import istr

from gateway import openai
from gateway.errors import BodyTimeout, ContextLengthExceeded, InvalidRequest, UnsupportedMediaType
from gateway.head import HEAD, Head
from gateway.openai import ChatRequest, CompletionRequest, Reading
from gateway.openai.keys import LONG_BYTES
from gateway.unpacking import encoding_of, unpacked
from policies import wire

if TYPE_CHECKING:
    from gateway.auth import Caller
    from gateway.house import Gateway

T = TypeVar("T")

PIECE_BYTES = 64 << 10
"""Of a body, that have to come within ``server.stall_s``: who sends a byte now and then would else be waited for for
days."""
RECEIPT = istr("x-penstock-receipt")

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


def query_of(request: web.Request, type_: type[T]) -> T:
    """Its query as ``type_`` names it; what ends with [] is a list. Raises Malformed."""
    query = request.query
    given = {name: query.getall(name) if name.endswith("[]") else value for name, value in query.items()}
    return openai.converted(given, type_, "", strict=False)


def may_store(gw: Gateway, caller: Caller) -> bool:
    """Responses, chats and conversations of this caller."""
    return gw.settings.responses.store and caller.policy.store_responses


def control_of(request: web.Request) -> str:
    """Its Cache-Control, empty when it has none."""
    return request.headers.get(hdrs.CACHE_CONTROL, "")


def wants_receipt(request: web.Request, call: ChatRequest | CompletionRequest | Reading) -> bool:
    """By its header or by its body. Raises InvalidRequest."""
    said = request.headers.get(RECEIPT)
    if said is not None and said.lower() not in ("true", "false"):
        raise InvalidRequest(f"Invalid header '{RECEIPT}': it is true or false", param=str(RECEIPT))
    by_body = call.penstock is not None and bool(call.penstock.receipt)
    return by_body or (said is not None and said.lower() == "true")


async def loaded(
    gw: Gateway, caller: Caller, call: ChatRequest | CompletionRequest | Reading, noted: Head
) -> wire.Ready:
    """As ``Dispatch.loaded``: a part of the way of its own, and a long one."""
    noted.load_at = time.monotonic()
    facts = await gw.dispatch.loaded(call.model, caller, call.service_tier)
    noted.render_at = time.monotonic()
    return facts


def room_for(num_prompt_tokens: int, facts: wire.Ready, param: str) -> int:
    """How many tokens the answer may have, at least one. Raises ContextLengthExceeded, and InvalidRequest where the
    model writes none at all."""
    if not facts.writes:
        raise InvalidRequest("This model writes nothing: ask it for vectors, at /v1/embeddings.", param="model")
    room = facts.max_model_tokens - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded.of(facts.max_model_tokens, num_prompt_tokens, param)
    return room


def fingerprint(facts: wire.Ready, adapter_id: str = "") -> str:
    """``system_fingerprint``: the same as long as the same seed gives the same tokens."""
    # Ranks add up in an order of their own.
    layout = () if facts.num_ranks == 1 else (facts.tensor_parallel, facts.pipeline_parallel)
    how = (*layout, "deterministic") if facts.deterministic else layout
    adapter = (adapter_id,) if adapter_id else ()
    served = facts.model, facts.device, facts.dtype, facts.vocab_size, facts.max_model_tokens
    return _fingerprint(*served, *how, *adapter)


def fingerprint_of(model: str) -> str:
    """Of one that upstreams answer for, of which nothing else is known."""
    return _fingerprint("upstreams", model)


@lru_cache
def _fingerprint(*facts: str | int) -> str:
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]
