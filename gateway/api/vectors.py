"""POST /v1/embeddings, /v1/rerank and /v1/score: texts are read, none is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from gateway import openai, reply
from gateway.api.answer import give
from gateway.api.request import fingerprint, taken_body_of
from gateway.auth import Caller
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.text import Text
from policies import wire
from policies.terms import Sampling

NOTHING_WRITTEN = Sampling(max_tokens=1)

Asked = tuple[list[int], wire.Pooling]
"""A prompt, and what is to become of it."""


async def embed(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(request)
    call = openai.parse_embedding(body)
    caller.check(call.model, "embeddings")
    return await gw.idempotency.once(request, caller, body, lambda: embedded(gw, request, caller, call))


async def rerank(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(request)
    call = openai.parse_rerank(body)
    caller.check(call.model, "rerank")
    return await gw.idempotency.once(request, caller, body, lambda: _reranked(gw, request, caller, call))


async def score(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(request)
    call = openai.parse_score(body)
    caller.check(call.model, "rerank")
    return await gw.idempotency.once(request, caller, body, lambda: _scored(gw, request, caller, call))


async def embedded(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.EmbeddingRequest,
    shaped: Callable[..., reply.VectorAnswer] = reply.EmbeddingAnswer,
) -> web.StreamResponse:
    """Also for other dialects, each with an answer of its own shape."""
    text, facts = await _opened(gw, caller, call)
    pooling, num_dimensions = _pooling(facts), call.dimensions or 0
    if num_dimensions > facts.num_dimensions:
        raise InvalidRequest(
            f"Invalid 'dimensions': this model's vectors have {facts.num_dimensions}", param="dimensions"
        )
    if call.texts:
        prompts = await text.encode(call.texts)
    else:
        prompts = call.token_ids
        if any(token_id >= facts.vocab_size for prompt in prompts for token_id in prompt):
            raise openai.Malformed(f"Invalid 'input': the vocabulary has {facts.vocab_size} tokens", "input")
    pooling = wire.Pooling(pooling.kind, pooling.is_normalized, num_dimensions)
    asked = [(prompt, pooling) for prompt in prompts]
    return await _given(gw, request, caller, call, text, facts, asked, "input", shaped)


async def _reranked(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.RerankRequest
) -> web.StreamResponse:
    text, facts = await _opened(gw, caller, call)
    texts = call.texts
    if call.max_tokens_per_doc is not None:
        texts = await text.cut(texts, call.max_tokens_per_doc)
    asked, places = await _of_pairs([(call.query, each) for each in texts], text, facts)
    shaped = partial(reply.RerankAnswer, pairs=places)
    return await _given(gw, request, caller, call, text, facts, asked, "documents", shaped)


async def _scored(gw: Gateway, request: web.Request, caller: Caller, call: openai.ScoreRequest) -> web.StreamResponse:
    text, facts = await _opened(gw, caller, call)
    asked, places = await _of_pairs(call.pairs, text, facts)
    shaped = partial(reply.ScoreAnswer, pairs=places)
    return await _given(gw, request, caller, call, text, facts, asked, "text_2", shaped)


async def _opened(gw: Gateway, caller: Caller, call: openai.Reading) -> tuple[Text, wire.Ready]:
    text, facts = gw.dispatch.text(call.model), gw.dispatch.ready(call.model)
    gw.ledger.check_room()
    if facts is None:
        facts = await gw.dispatch.loaded(call.model, caller, call.service_tier)
    return text, facts


def _pooling(facts: wire.Ready) -> wire.Pooling:
    if facts.pooling is None:
        raise InvalidRequest("This model gives no vectors.", param="model")
    return facts.pooling


async def _of_pairs(
    pairs: Sequence[tuple[str, str]], text: Text, facts: wire.Ready
) -> tuple[list[Asked], list[tuple[int, int]] | None]:
    """For the model's own head, both texts in one prompt. Where it has none, each text once, and the places of a
    pair's: their vectors are compared."""
    if facts.scores:
        encoded = await text.encode_pairs(pairs)
        return [(prompt, wire.Pooling("score", second_at=second_at)) for prompt, second_at in encoded], None
    pooling = wire.Pooling(_pooling(facts).kind)
    place = {each: number for number, each in enumerate(dict.fromkeys(each for pair in pairs for each in pair))}
    asked = [(prompt, pooling) for prompt in await text.encode(list(place))]
    return asked, [(place[first], place[second]) for first, second in pairs]


async def _given(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.Reading,
    text: Text,
    facts: wire.Ready,
    asked: Sequence[Asked],
    param: str,
    shaped: Callable[..., reply.VectorAnswer],
) -> web.StreamResponse:
    """The rest of the way is that of all answers."""
    request_id = request[HEAD].request_id
    salt = gw.cache.salt_of(caller.tenant_id, caller.policy.cache)
    parts = []
    for number, (prompt, pooling) in enumerate(asked):
        if not prompt:
            raise openai.Malformed(f"Invalid '{param}': there is not one token in it", param, "empty_string")
        if len(prompt) > facts.max_model_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {facts.max_model_tokens} tokens. However, a text of your"
                f" {param} (number {number}) resulted in {len(prompt)} tokens. Please reduce its length.",
                param=param,
            )
        part_id = request_id if len(asked) == 1 else f"{request_id}-{number}"
        parts.append(reply.Part(wire.Submit(part_id, prompt, NOTHING_WRITTEN, cache_salt=salt, pooling=pooling)))
    order = gw.dispatch.order(caller, call.service_tier, len(asked[0][0]), 0)
    model = fingerprint(facts, gw.dispatch.adapter_id(call.model))
    return await give(gw, request, caller, shaped(call, parts, text, model, gw.dispatch.tier_of(order)), order)
