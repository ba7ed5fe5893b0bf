"""POST /v1/completions: text goes on as it stands, several prompts at once if need be."""

from __future__ import annotations

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
from gateway.api.request import fingerprint, loaded, room_for
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.head import HEAD, part_ids
from gateway.house import Gateway
from gateway.text import Text
from policies import wire
from policies.priority import Order

A = TypeVar("A", bound=reply.Answer)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, where a chat goes on until the context is full."""
MAX_SCORES = 1_000_000
"""Log-probabilities of prompts in one answer, each prompt's as often as it is echoed: those of one fit into one frame
of the wire, and all are made JSON at once."""


async def complete(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = await parsed(openai.parse_completion, body)
    caller.check(call.model, "completions")
    return await gw.idempotency.once(request, caller, body, lambda: _patiently(gw, request, caller, call))


def _patiently(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.CompletionRequest
) -> Awaitable[web.StreamResponse]:
    return patient(gw, request, call, _answered(gw, request, caller, call))


async def _answered(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.CompletionRequest
) -> web.StreamResponse:
    answer, order = await prepared(gw, request, caller, call, reply.TextAnswer)
    return await give(gw, request, caller, answer, order)


async def prepared(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.CompletionRequest,
    shaped: Callable[..., A],
    is_here: bool = False,
) -> tuple[A, Order]:
    """As that of chats: so far for every dialect in which a text may be gone on with."""
    noted = request[HEAD]
    noted.render_at = time.monotonic()
    if not is_here and gw.upstreams.of(call.model) is not None:
        way = elsewhere.taken(gw, caller, call, "completions", call.prompt, not call.echo)
        if way is not None:
            here = partial(prepared, gw, request, caller, shaped=reply.TextAnswer, is_here=True)
            return await elsewhere.completion(gw, request, caller, call, shaped, way, here)
    text, facts = gw.dispatch.text(call.model), gw.dispatch.ready(call.model)
    gw.ledger.check_room()
    grammar = await gw.grammars.checked(openai.asked_grammar(call), caller.tenant_id)
    if facts is None:
        facts = await loaded(gw, request, caller, call)
    texts, (prompts, end_ids) = call.texts, await _prompts(caller, call, text, facts)
    asked_tokens = DEFAULT_MAX_TOKENS if call.max_tokens is None else max(1, call.max_tokens)
    salt = gw.cache.salt_of(caller.tenant_id, caller.policy.cache, call.cache_salt)
    bad_words = await text.bad_words(call.bad_words, caller.tenant_id) if call.bad_words else ()
    parts, num_scores, ids = [], 0, part_ids(noted.request_id, len(prompts))
    for number, prompt in enumerate(prompts):
        room = room_for(len(prompt), facts, "prompt")
        sampling = openai.sampling(call, min(asked_tokens, room), facts.vocab_size, bad_words)
        if end_ids:
            stop_token_ids = (*sampling.stop_token_ids, *end_ids)
            sampling = msgspec.structs.replace(sampling, stop_token_ids=stop_token_ids)
        if sampling.num_prompt_logprobs is not None:
            num_scores += len(prompt) * (1 + sampling.num_prompt_logprobs) * call.num_sequences
        if num_scores > MAX_SCORES:
            raise openai.Malformed(f"'echo' with 'logprobs' gives at most {MAX_SCORES} numbers", "logprobs")
        submit = wire.Submit(
            ids[number], prompt, sampling, call.num_sequences, 0, salt, noted.traceparent, grammar=grammar
        )
        preamble = (texts[number] if texts else text.decode(prompt)) if call.echo else ""
        parts.append(reply.Part(submit, preamble))
    most = max(part.submit.sampling.max_tokens for part in parts)
    order = gw.dispatch.order(caller, call.service_tier, len(prompts[0]), most, call.num_sequences)
    model = fingerprint(facts, gw.dispatch.adapter_id(call.model))
    return shaped(call, parts, text, model, gw.dispatch.tier_of(order)), order


async def _prompts(
    caller: Caller, call: openai.CompletionRequest, text: Text, facts: wire.Ready
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Token ids of each prompt, and those that end an answer besides the model's own."""
    tenant_id = caller.tenant_id
    if call.suffix:
        return await text.encode_infill(call.texts, call.suffix, facts.max_model_tokens, tenant_id=tenant_id)
    if call.texts:
        with_specials = call.add_special_tokens is not False
        prompts = await text.encode(call.texts, with_specials, facts.max_model_tokens, tenant_id=tenant_id)
        if not all(prompts):
            raise openai.Malformed("Invalid 'prompt': there is not one token in it", "prompt", "empty_string")
        return prompts, ()
    if call.prompt is None:
        ((*begins,),) = await text.encode([""], tenant_id=tenant_id)
        # Where nothing begins a text, what ends the one before it does.
        return [begins[:1] or facts.eos_token_ids[:1]], ()
    prompts = call.token_ids
    for prompt in prompts:
        room_for(len(prompt), facts, "prompt")
        if max(prompt) >= facts.vocab_size:
            raise openai.Malformed(f"Invalid 'prompt': the vocabulary has {facts.vocab_size} tokens", "prompt")
    return prompts, ()
