"""POST /v1/embeddings, /v1/rerank and /v1/score: texts are read, none is written."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from aiohttp import web

from gateway import openai, reply
from gateway.api import elsewhere
from gateway.api.answer import give
from gateway.api.request import fingerprint, loaded
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.head import HEAD, part_ids
from gateway.house import Gateway
from gateway.text import Text
from policies import wire
from policies.priority import Order
from policies.terms import Sampling

A = TypeVar("A", bound=reply.VectorAnswer)
R = TypeVar("R", bound=openai.Reading)
NOTHING_WRITTEN = Sampling(max_tokens=1)

Asked = tuple[list[int], wire.Pooling]
"""A prompt, and what is to become of it."""


async def embed(gw: Gateway, request: web.Request) -> web.StreamResponse:
    return await _begun(gw, request, openai.parse_embedding, "embeddings", embedded)


async def rerank(gw: Gateway, request: web.Request) -> web.StreamResponse:
    return await _begun(gw, request, openai.parse_rerank, "rerank", _ranked)


async def score(gw: Gateway, request: web.Request) -> web.StreamResponse:
    return await _begun(gw, request, openai.parse_score, "rerank", _ranked)


async def _begun(
    gw: Gateway,
    request: web.Request,
    parse: Callable[[bytes], R],
    endpoint: str,
    answered: Callable[[Gateway, web.Request, Caller, R], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = await parsed(parse, body)
    caller.check(call.model, endpoint)
    return await gw.idempotency.once(request, caller, body, lambda: answered(gw, request, caller, call))


async def embedded(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.EmbeddingRequest,
    shaped: Callable[..., reply.VectorAnswer] = reply.EmbeddingAnswer,
) -> web.StreamResponse:
    """Also for other dialects, each with an answer of its own shape."""
    way = elsewhere.taken(gw, caller, call, "embeddings", call.input, call.truncate_prompt_tokens in (None, -1))
    if way is not None:
        here = partial(_embedding, gw, request, caller, shaped=reply.EmbeddingAnswer)
        answer, order = await elsewhere.embeddings(gw, request, caller, call, shaped, way, here)
    else:
        answer, order = await _embedding(gw, request, caller, call, shaped)
    return await give(gw, request, caller, answer, order)


async def _embedding(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.EmbeddingRequest, shaped: Callable[..., A]
) -> tuple[A, Order]:
    text, facts = await _opened(gw, request, caller, call)
    pooling, num_dimensions = _pooling(facts), call.dimensions or 0
    if num_dimensions > facts.num_dimensions:
        raise InvalidRequest(
            f"Invalid 'dimensions': this model's vectors have {facts.num_dimensions}", param="dimensions"
        )
    cut_at, most = _cut_at(call, facts), facts.max_model_tokens
    if call.texts:
        prompts = await text.encode(
            call.texts, max_tokens=most, param="input", cut_at=cut_at, tenant_id=caller.tenant_id
        )
    else:
        prompts = [prompt[:cut_at] for prompt in call.token_ids]
        if any(max(prompt, default=0) >= facts.vocab_size for prompt in prompts):
            raise openai.Malformed(f"Invalid 'input': the vocabulary has {facts.vocab_size} tokens", "input")
    pooling = wire.Pooling(pooling.kind, pooling.is_normalized, num_dimensions)
    asked = [(prompt, pooling) for prompt in prompts]
    return _answer(gw, request, caller, call, text, facts, asked, "input", shaped)


async def _ranked(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.RerankRequest | openai.ScoreRequest
) -> web.StreamResponse:
    if isinstance(call, openai.RerankRequest):
        shaped: type[reply.Scored] = reply.RerankAnswer
        suits = call.max_tokens_per_doc is None
    else:
        shaped = reply.ScoreAnswer
        suits = len({first for first, _ in call.pairs}) == 1
    suits = suits and call.truncate_prompt_tokens in (None, -1)
    # Each text once: pairs would have the one that all have in common as often as there are others.
    way = elsewhere.taken(gw, caller, call, "rerank", call.texts_once, suits)
    here = partial(_ranking, gw, request, caller, shaped=shaped)
    if way is not None:
        answer, order = await elsewhere.ranking(gw, request, caller, call, shaped, way, here)
    else:
        answer, order = await here(call=call)
    return await give(gw, request, caller, answer, order)


async def _ranking(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.RerankRequest | openai.ScoreRequest,
    shaped: Callable[..., A],
) -> tuple[A, Order]:
    text, facts = await _opened(gw, request, caller, call)
    if isinstance(call, openai.RerankRequest):
        texts, names = call.texts, ("query", "documents")
        if call.max_tokens_per_doc is not None and call.max_tokens_per_doc <= facts.max_model_tokens:
            texts = await text.cut(texts, call.max_tokens_per_doc, caller.tenant_id)
        pairs: Sequence[tuple[str, str]] = [(call.query, each) for each in texts]
    else:
        pairs, names = call.pairs, call.sides
    asked, places = await _of_pairs(caller, pairs, text, facts, names, _cut_at(call, facts))
    return _answer(gw, request, caller, call, text, facts, asked, names[1], partial(shaped, pairs=places))


async def _opened(gw: Gateway, request: web.Request, caller: Caller, call: openai.Reading) -> tuple[Text, wire.Ready]:
    noted = request[HEAD]
    noted.render_at = time.monotonic()
    text, facts = gw.dispatch.text(call.model), gw.dispatch.ready(call.model)
    gw.ledger.check_room()
    if facts is None:
        facts = await loaded(gw, request, caller, call)
    return text, facts


def _cut_at(
    call: openai.EmbeddingRequest | openai.RerankRequest | openai.ScoreRequest, facts: wire.Ready
) -> int | None:
    """So many tokens of a prompt are read; None: all, or it is refused."""
    cut = call.truncate_prompt_tokens
    if cut is None:
        return None
    return facts.max_model_tokens if cut < 0 else min(cut, facts.max_model_tokens)


def _pooling(facts: wire.Ready) -> wire.Pooling:
    if facts.pooling is None:
        raise InvalidRequest("This model gives no vectors.", param="model")
    return facts.pooling


async def _of_pairs(
    caller: Caller,
    pairs: Sequence[tuple[str, str]],
    text: Text,
    facts: wire.Ready,
    names: tuple[str, str],
    cut_at: int | None,
) -> tuple[list[Asked], list[tuple[int, int]] | None]:
    """For the model's own head, both texts in one prompt. Where it has none, each text once, and the places of a
    pair's: their vectors are compared. ``names``: of the parameters that the first and the second of a pair are in."""
    if facts.scores:
        encoded = await text.encode_pairs(pairs, facts.max_model_tokens, names[1], cut_at, caller.tenant_id)
        return [(prompt, wire.Pooling("score", second_at=second_at)) for prompt, second_at in encoded], None
    pooling = wire.Pooling(_pooling(facts).kind)
    place: dict[str, int] = {}
    asked: list[Asked] = []
    for side, name in enumerate(names):
        texts = [each for each in dict.fromkeys(pair[side] for pair in pairs) if each not in place]
        prompts = await text.encode(
            texts, max_tokens=facts.max_model_tokens, param=name, cut_at=cut_at, tenant_id=caller.tenant_id
        )
        for number, (each, prompt) in enumerate(zip(texts, prompts, strict=True)):
            _check(prompt, facts, name, number)
            place[each] = len(asked)
            asked.append((prompt, pooling))
    return asked, [(place[first], place[second]) for first, second in pairs]


def _check(prompt: list[int], facts: wire.Ready, param: str, number: int) -> None:
    if not prompt:
        raise openai.Malformed(f"Invalid '{param}': there is not one token in it", param, "empty_string")
    if len(prompt) > facts.max_model_tokens:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {facts.max_model_tokens} tokens. However, a text of your"
            f" {param} (number {number}) resulted in {len(prompt)} tokens. Please reduce its length.",
            param=param,
        )


def _answer(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.Reading,
    text: Text,
    facts: wire.Ready,
    asked: Sequence[Asked],
    param: str,
    shaped: Callable[..., A],
) -> tuple[A, Order]:
    """The rest of the way is that of all answers."""
    noted = request[HEAD]
    salt = gw.cache.salt_of(caller.tenant_id, caller.policy.cache, call.cache_salt)
    parts, ids = [], part_ids(noted.request_id, len(asked))
    for number, (prompt, pooling) in enumerate(asked):
        _check(prompt, facts, param, number)
        submit = wire.Submit(ids[number], prompt, NOTHING_WRITTEN, 1, 0, salt, noted.traceparent, pooling=pooling)
        parts.append(reply.Part(submit))
    order = gw.dispatch.order(caller, call.service_tier, len(asked[0][0]), 0)
    model = fingerprint(facts, gw.dispatch.adapter_id(call.model))
    return shaped(call, parts, text, model, gw.dispatch.tier_of(order)), order
