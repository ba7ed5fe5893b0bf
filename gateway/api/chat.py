"""POST /v1/chat/completions: the whole journey of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from gateway import openai, reply
from gateway.api.answer import give
from gateway.api.held import held_of
from gateway.api.request import fingerprint, room_for, taken_body_of
from gateway.auth import Caller
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.parsers.reader import Wanted
from policies import wire
from policies.priority import Order

A = TypeVar("A", bound=reply.Answer)


async def complete(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(request)
    call = openai.parse_chat(body)
    caller.check(call.model, "chat.completions")
    return await gw.idempotency.once(request, caller, body, lambda: answered(gw, request, caller, call))


async def answered(gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest) -> web.StreamResponse:
    answer, order = await prepared(gw, request, caller, call, reply.ChatAnswer)
    return await give(gw, request, caller, answer, order)


async def prepared(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest, shaped: Callable[..., A]
) -> tuple[A, Order]:
    """The answer that is to be given, in the form that ``shaped`` makes of what ``reply.Answer`` takes, and what the
    line has to know of it: so far for every dialect in which a conversation may be asked for."""
    text, facts = gw.dispatch.text(call.model), gw.dispatch.ready(call.model)
    gw.ledger.check_room()
    asked = openai.asked_grammar(call)
    content = None if asked is None else await gw.grammars.checked(asked)
    tools = call.tooling()
    held = None if tools is None else await held_of(gw, tools, content)
    if facts is None:
        facts = await gw.dispatch.loaded(call.model, caller, call.service_tier)
    prompt = await prompt_of(gw, caller, call)
    room = room_for(len(prompt), facts, "messages")
    sampling = openai.sampling(call, min(call.asked_tokens or room, room), facts.vocab_size)
    salt = gw.cache.salt_of(caller.tenant_id, caller.policy.cache)
    order = gw.dispatch.order(caller, call.service_tier, len(prompt), sampling.max_tokens, call.num_choices)
    priority = gw.dispatch.priority_of(order)
    is_thinking = text.is_thinking(prompt)
    grammar = text.tongue.grammar(held, content, is_thinking)
    submit = wire.Submit(request[HEAD].request_id, prompt, sampling, call.num_choices, priority, salt, grammar=grammar)
    if call.prediction is not None and call.prediction.text:
        (predicted,) = await text.encode([call.prediction.text], with_specials=False)
        submit = msgspec.structs.replace(submit, predicted_token_ids=predicted[: facts.max_model_tokens])
    model = fingerprint(facts, gw.dispatch.adapter_id(call.model))
    wanted = None
    if tools is not None:
        wanted = Wanted(frozenset(each.name for each in tools.functions), tools.several, tools.schemas)
    parsers = text.tongue.parsers(wanted, is_thinking)
    return shaped(call, [reply.Part(submit)], text, model, gw.dispatch.tier_of(order), parsers), order


async def prompt_of(gw: Gateway, caller: Caller, call: openai.ChatRequest) -> list[int]:
    """The conversation as its model reads it, in token ids."""
    text = gw.dispatch.text(call.model)
    tools = call.tooling()
    shown = None if tools is None else tools.shown
    return await text.encode_chat(call.messages, shown, call.template_switches, caller.tenant_id)
