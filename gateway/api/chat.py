"""POST /v1/chat/completions: the journey of a request to its prompt in tokens. From there ``answer`` leads on."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from gateway import openai, reply
from gateway.api import elsewhere
from gateway.api.answer import give
from gateway.api.early import patient
from gateway.api.held import grammar_of, held_of
from gateway.api.request import fingerprint, loaded, may_store, room_for
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.chats.answer import KeptAnswer
from gateway.chats.shelf import Kept
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.parsers.reader import Wanted
from gateway.reply.events import OUTLET, EventStream
from gateway.reply.storing import Storing
from gateway.shelving import ShelfAway
from gateway.telemetry import about
from gateway.text import Text
from gateway.text.length import CHARS_A_TOKEN
from policies import wire
from policies.priority import Order

MAX_COUNTED = 1 << 20
"""Tokens of a prompt that is only counted, or shown as tokens."""

A = TypeVar("A", bound=reply.Answer)
log = logging.getLogger(__name__)


async def complete(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = await parsed(openai.parse_chat, body)
    caller.check(call.model, "chat.completions")
    return await gw.idempotency.once(request, caller, body, lambda: answered(gw, request, caller, call))


def answered(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest
) -> Awaitable[web.StreamResponse]:
    answer = _kept if call.store and may_store(gw, caller) else _given
    return patient(gw, request, call, answer(gw, request, caller, call))


async def _given(gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest) -> web.StreamResponse:
    answer, order = await prepared(gw, request, caller, call, reply.ChatAnswer)
    return await give(gw, request, caller, answer, order)


async def _kept(gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest) -> web.StreamResponse:
    """An answer that is stored as well. One that cannot be is given all the same, as it is paid for."""
    answer, order = await prepared(gw, request, caller, call, KeptAnswer)

    async def store(last: bytes) -> bytes:
        try:
            await gw.chats.put(Kept.of(caller.tenant_id, call, answer.completion()), call.metadata or {})
        except ShelfAway:
            noted = request[HEAD]
            log.warning("chat completion %s is not stored", answer.id, extra=about(noted.request_id, noted.trace_id))
        return last

    if call.stream:
        outlet = request.get(OUTLET) or EventStream(request, gw.settings.server, gw.clock)
        request[OUTLET] = Storing(outlet, store)
        return await give(gw, request, caller, answer, order)
    response = await give(gw, request, caller, answer, order)
    await store(b"")
    return response


async def prepared(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.ChatRequest,
    shaped: Callable[..., A],
    is_here: bool = False,
) -> tuple[A, Order]:
    """The answer that is to be given, in the form that ``shaped`` makes of what ``reply.Answer`` takes, and what the
    line has to know of it: so far for every dialect in which a conversation may be asked for. ``is_here``: no upstream
    is to be asked."""
    noted = request[HEAD]
    noted.render_at = time.monotonic()
    if not is_here and gw.upstreams.of(call.model) is not None:
        way = elsewhere.taken(gw, caller, call, "chat", call.messages)
        if way is not None:
            here = partial(prepared, gw, request, caller, shaped=reply.ChatAnswer, is_here=True)
            return await elsewhere.chat(gw, request, caller, call, shaped, way, here)
    text, facts = gw.dispatch.text(call.model), gw.dispatch.ready(call.model)
    gw.ledger.check_room()
    asked = openai.asked_grammar(call)
    content = None if asked is None else await gw.grammars.checked(asked, caller.tenant_id)
    tools = call.tooling()
    held = None if tools is None else await held_of(gw, caller.tenant_id, tools, content, text.tongue)
    if facts is None:
        facts = await loaded(gw, request, caller, call)
    prompt = await _read(text, caller, call, tools, facts.max_model_tokens)
    room = room_for(len(prompt), facts, "messages")
    bad_words = await text.bad_words(call.bad_words, caller.tenant_id) if call.bad_words else ()
    sampling = openai.sampling(call, min(call.asked_tokens or room, room), facts.vocab_size, bad_words)
    salt = gw.cache.salt_of(caller.tenant_id, caller.policy.cache, call.cache_salt)
    order = gw.dispatch.order(caller, call.service_tier, len(prompt), sampling.max_tokens, call.num_choices)
    priority = gw.dispatch.priority_of(order)
    is_thinking = text.is_thinking(prompt)
    grammar = grammar_of(gw, caller.tenant_id, held, content, is_thinking, text.tongue)
    submit = wire.Submit(
        noted.request_id, prompt, sampling, call.num_choices, priority, salt, noted.traceparent, grammar=grammar
    )
    if call.prediction is not None and call.prediction.text:
        likely = call.prediction.text[: CHARS_A_TOKEN * facts.max_model_tokens]
        (predicted,) = await text.encode([likely], with_specials=False, tenant_id=caller.tenant_id)
        submit = msgspec.structs.replace(submit, predicted_token_ids=predicted[: facts.max_model_tokens])
    model = fingerprint(facts, gw.dispatch.adapter_id(call.model))
    wanted = None
    if tools is not None:
        names = frozenset(each.name for each in tools.functions)
        withheld = frozenset(each["function"]["name"] for each in tools.shown) - names
        wanted = Wanted(names, tools.several, tools.schemas, tools.custom, withheld)
    parsers = text.tongue.parsers(wanted, is_thinking)
    return shaped(call, [reply.Part(submit)], text, model, gw.dispatch.tier_of(order), parsers), order


async def prompt_of(gw: Gateway, caller: Caller, call: openai.ChatRequest) -> list[int]:
    """The conversation as its model reads it, in token ids; as many as are estimated, where only an upstream knows."""
    pool = gw.upstreams.of(call.model)
    if pool is not None and not pool.is_overflow:
        return (await elsewhere.prompt_of(pool, caller, call))[0]
    return await _read(gw.dispatch.text(call.model), caller, call, call.tooling(), MAX_COUNTED)


def _read(
    text: Text, caller: Caller, call: openai.ChatRequest, tools: openai.Tooling | None, max_tokens: int
) -> Awaitable[list[int]]:
    shown = None if tools is None else tools.shown
    return text.encode_chat(call.messages, shown, call.template_switches, caller.tenant_id, max_tokens)
