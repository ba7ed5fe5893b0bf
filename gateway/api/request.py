"""What the endpoints ask of a request before they submit it."""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from aiohttp import hdrs, web
from multidict import istr

from gateway import openai, reply
from gateway.api.early import EARLY
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.head import HEAD
from gateway.openai import ChatRequest, CompletionRequest, Reading
from policies import wire

if TYPE_CHECKING:
    from gateway.auth import Caller
    from gateway.house import Gateway

T = TypeVar("T")

RECEIPT = istr("x-penstock-receipt")


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
    gw: Gateway, request: web.Request, caller: Caller, call: ChatRequest | CompletionRequest | Reading
) -> wire.Ready:
    """As ``Dispatch.loaded``: a part of the way of its own, and a long one. A stream is opened when it has been silent
    for as long as it may be."""
    noted = request[HEAD]
    noted.load_at = time.monotonic()
    loading = gw.dispatch.loaded(call.model, caller, call.service_tier)
    early = request.get(EARLY)
    facts = await (loading if early is None else reply.awaited(early, loading, gw.settings.server.heartbeat_s))
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


def fingerprint(facts: wire.Ready, adapter_id: str) -> str:
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
