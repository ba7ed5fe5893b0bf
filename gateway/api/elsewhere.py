"""Requests whose model an upstream answers for, or relieves: the same way as all others, but for who is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import msgspec
from aiohttp import web

from gateway import errors, openai, reply
from gateway.api.request import fingerprint_of
from gateway.auth import Caller
from gateway.head import HEAD, part_ids
from gateway.house import Gateway
from gateway.reply.told import ToldChoice, ToldPart, ToldText
from gateway.text import Text
from gateway.upstreams.asking import Asked, fields_of, most_prompt_tokens, packed, rerank_fields
from gateway.upstreams.here import Here
from gateway.upstreams.pool import Pool
from policies import wire
from policies.priority import Order
from policies.terms import Sampling
from policies.upstreams.terms import Kind

A = TypeVar("A", bound=reply.Answer)
AnyCall = openai.ChatRequest | openai.CompletionRequest | openai.Reading

MOST_TOKENS = 1 << 20
"""An answer's, where neither the request nor the upstream's terms say."""
VOCABULARY = 2**31
"""Token ids are the upstream's affair."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion, OpenAI's."""


class Unread:
    """In the place of a model's text, where an upstream reads and writes it."""

    vocabulary = None

    def decoder(self, continues: bool = False) -> None:
        """None is needed."""


class Way(NamedTuple):
    """Past the workers here, or through their line."""

    pool: Pool
    is_first_here: bool = False
    """It may wait for a worker as long as that comes in time."""


class Prepare(Protocol):
    """As far as a request goes here until it is sent to workers."""

    def __call__(self, *, call: Any) -> Awaitable[tuple[reply.Answer, Order]]: ...


def taken(gw: Gateway, caller: Caller, call: AnyCall, kind: Kind, prompt: Any, suits: bool = True) -> Way | None:
    """The upstreams that answer; None: the workers here do. Those that relieve a model are asked where no worker is
    there, or its line would miss what the class promises; where it would have to wait, it may turn out so. ``suits``:
    upstreams can be asked this."""
    model = call.model
    pool = gw.upstreams.of(model)
    if pool is None or not pool.is_overflow:
        return None if pool is None else Way(pool)
    if not suits or not pool.serves(kind) or not pool.is_up(kind):
        return None
    num_prompt_tokens = len(packed(prompt))
    if gw.dispatch.misses(model, gw.dispatch.order(caller, call.service_tier, num_prompt_tokens, 0)):
        return Way(pool)
    most, num_sequences = 0, 1
    if not isinstance(call, openai.Reading):
        asked_tokens = call.asked_tokens if isinstance(call, openai.ChatRequest) else call.max_tokens
        most, num_sequences = asked_tokens or MOST_TOKENS, call.num_choices
    order = gw.dispatch.order(caller, call.service_tier, num_prompt_tokens, most, num_sequences)
    return Way(pool, True) if gw.dispatch.waits(model, order, num_sequences) else None


async def chat(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.ChatRequest,
    shaped: Callable[..., A],
    way: Way,
    prepare: Prepare,
) -> tuple[A, Order]:
    """As ``chat.prepared``."""
    gw.ledger.check_room()
    pool, here = way.pool, await _here(gw, way, call, prepare)
    prompt, is_exact = await prompt_of(pool, caller, call)
    most = _room(pool, len(prompt), call.asked_tokens, "messages")
    sampling = openai.sampling(call, most, VOCABULARY)
    order = gw.dispatch.order(caller, call.service_tier, len(prompt), most, call.num_choices)
    asked = Asked(
        "chat",
        fields_of(call),
        bool(call.stream),
        call.num_choices,
        _most_prompt(call, prompt),
        _most_completion(call.asked_tokens, call.num_choices),
        is_exact,
        _salt(gw, caller, call),
    )
    priority = gw.dispatch.priority_of(order)
    submit = wire.Submit(request[HEAD].request_id, prompt, sampling, call.num_choices, priority)
    return _shaped(gw, request, call, [(submit, asked, here)], shaped, way, order, ToldChoice), order


async def completion(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.CompletionRequest,
    shaped: Callable[..., A],
    way: Way,
    prepare: Prepare,
) -> tuple[A, Order]:
    """As ``completions.prepared``: each prompt is a request of its own."""
    pool = way.pool
    gw.ledger.check_room()
    if call.echo:
        raise errors.InvalidRequest("'echo' is not served for this model.", param="echo", code="unsupported_parameter")
    if call.prompt is None:
        raise openai.Malformed("Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter")
    prompts: list[Any] = list(call.texts or call.token_ids)
    text = pool.text
    asked_tokens = DEFAULT_MAX_TOKENS if call.max_tokens is None else call.max_tokens
    if text is not None and call.texts:
        ids = await text.encode(call.texts, call.add_special_tokens is not False, tenant_id=caller.tenant_id)
    else:
        ids = [_ids(prompt) for prompt in prompts]
    parts = []
    names = part_ids(request[HEAD].request_id, len(prompts))
    for part_id, prompt, prompt_ids in zip(names, prompts, ids, strict=True):
        most = _room(pool, len(prompt_ids), asked_tokens, "prompt")
        asked = Asked(
            "completions",
            {**fields_of(call), "prompt": prompt},
            bool(call.stream),
            call.num_choices,
            most_prompt_tokens(prompt, 1),
            _most_completion(asked_tokens, call.num_sequences),
            text is not None or isinstance(prompt, list),
            _salt(gw, caller, call),
        )
        sampling = openai.sampling(call, most, VOCABULARY)
        alone = msgspec.structs.replace(call, prompt=prompt, best_of=None)
        here = await _here(gw, way, alone, prepare)
        parts.append((wire.Submit(part_id, prompt_ids, sampling, call.num_choices), asked, here))
    order = gw.dispatch.order(caller, call.service_tier, len(ids[0]), asked_tokens, call.num_choices)
    return _shaped(gw, request, call, parts, shaped, way, order, ToldText), order


async def embeddings(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.EmbeddingRequest,
    shaped: Callable[..., A],
    way: Way,
    prepare: Prepare,
) -> tuple[A, Order]:
    """All texts in one request."""
    _check_whole(call)
    prompts: list[Any] = list(call.texts or call.token_ids)
    fields: dict[str, Any] = {"input": prompts, "encoding_format": "float"}
    if call.dimensions is not None:
        fields["dimensions"] = call.dimensions
    return await _read(gw, request, caller, call, shaped, way, prepare, "embeddings", fields, prompts, len(prompts))


async def ranking(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.RerankRequest | openai.ScoreRequest,
    shaped: Callable[..., A],
    way: Way,
    prepare: Prepare,
) -> tuple[A, Order]:
    """Scores of documents, which are ordered here; and scores of pairs, where all have their first text in common."""
    _check_whole(call)
    if isinstance(call, openai.RerankRequest):
        if call.max_tokens_per_doc is not None:
            raise errors.InvalidRequest(
                "'max_tokens_per_doc' is not served for this model.", param="max_tokens_per_doc"
            )
        fields, prompts = rerank_fields(call), [call.query, *call.texts]
    else:
        pairs = call.pairs
        if len({first for first, _ in pairs}) > 1:
            name = call.sides[0]
            raise errors.InvalidRequest(f"'{name}' may be one text for this model.", param=name)
        fields = {"query": pairs[0][0], "documents": [second for _, second in pairs]}
        prompts = [fields["query"], *fields["documents"]]
    shaped = partial(shaped, pairs=None)
    return await _read(gw, request, caller, call, shaped, way, prepare, "rerank", fields, prompts, len(prompts) - 1)


def _check_whole(call: openai.EmbeddingRequest | openai.RerankRequest | openai.ScoreRequest) -> None:
    if call.truncate_prompt_tokens not in (None, -1):
        param = "truncate_prompt_tokens"
        raise errors.InvalidRequest(f"'{param}' is not served for this model.", param=param)


async def prompt_of(pool: Pool, caller: Caller, call: openai.ChatRequest) -> tuple[list[int], bool]:
    """In token ids, and whether they are the model's own; else they are as many as are estimated."""
    tools, text = call.tooling(), pool.text
    if text is not None:
        shown = None if tools is None else tools.shown
        ids = await text.encode_chat(call.messages, shown, call.template_switches, caller.tenant_id)
        return ids, True
    return packed(_said(call)), False


async def _read(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: openai.Reading,
    shaped: Callable[..., A],
    way: Way,
    prepare: Prepare,
    kind: Kind,
    fields: dict[str, Any],
    prompts: list[Any],
    num_answers: int,
) -> tuple[A, Order]:
    pool = way.pool
    gw.ledger.check_room()
    here = await _here(gw, way, call, prepare)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    text = pool.text
    ids = (
        await text.encode(texts, tenant_id=caller.tenant_id)
        if text is not None and texts
        else [_ids(prompt) for prompt in prompts]
    )
    prompt = [token_id for each in ids for token_id in each]
    # A reranker reads the query with each of the documents, and has its own marks between them.
    most = (num_answers if kind == "rerank" else 1) * most_prompt_tokens(prompts, len(prompts))
    salt = _salt(gw, caller, call)
    asked = Asked(kind, fields, False, num_answers, most, most, text is not None or not texts, salt)
    pooling = wire.Pooling("score" if kind == "rerank" else "last")
    submit = wire.Submit(request[HEAD].request_id, prompt, Sampling(max_tokens=1), num_answers, pooling=pooling)
    order = gw.dispatch.order(caller, call.service_tier, len(prompt), 0)
    return _shaped(gw, request, call, [(submit, asked, here)], shaped, way, order, ToldText), order


async def _here(gw: Gateway, way: Way, call: AnyCall, prepare: Prepare) -> Here | None:
    """How workers here would answer, if there are any that may. Raises what is wrong with the request where they come
    first."""
    model = way.pool.local(gw.dispatch.serves)
    if model is None:
        return None
    at_home = partial(prepare, call=msgspec.structs.replace(call, model=model))
    return Here(gw.dispatch, at_home, await at_home() if way.is_first_here else None)


def _shaped(
    gw: Gateway,
    request: web.Request,
    call: AnyCall,
    asked: list[tuple[wire.Submit, Asked, Here | None]],
    shaped: Callable[..., A],
    way: Way,
    order: Order,
    choice_type: type[ToldChoice],
) -> A:
    noted = request[HEAD]
    if noted.traceparent:
        context = noted.outgoing()
        replace, traceparent = msgspec.structs.replace, noted.traceparent
        asked = [
            (replace(submit, traceparent=traceparent), replace(each, context=context), here)
            for submit, each, here in asked
        ]
    parts = [
        ToldPart(submit, partial(_send, gw, way, each, here), each.identity, choice_type)
        for submit, each, here in asked
    ]
    return shaped(call, parts, cast(Text, Unread()), fingerprint_of(call.model), gw.dispatch.tier_of(order))


def _send(
    gw: Gateway, way: Way, asked: Asked, here: Here | None, submit: wire.Submit, order: Order, is_let_in: bool
) -> Any:
    if len(submit.prompt_token_ids) != order.num_prompt_tokens:
        order = msgspec.structs.replace(order, num_prompt_tokens=len(submit.prompt_token_ids))
    return gw.upstreams.submit(way.pool, asked, submit, order, here, way.is_first_here, is_let_in)


def _salt(gw: Gateway, caller: Caller, call: AnyCall) -> str:
    return gw.cache.told_salt_of(caller.tenant_id, caller.policy.cache, call.cache_salt)


def _room(pool: Pool, num_prompt_tokens: int, asked_tokens: int | None, param: str) -> int:
    """Tokens that the answer may have. Raises ContextLengthExceeded."""
    most = pool.max_model_tokens
    if not most:
        return max(1, asked_tokens or MOST_TOKENS)
    room = most - num_prompt_tokens
    if room < 1:
        raise errors.ContextLengthExceeded.of(most, num_prompt_tokens, param, "The tokens are an estimate.")
    return max(1, min(asked_tokens or room, room))


def _most_prompt(call: openai.ChatRequest, prompt: list[int]) -> int:
    return max(most_prompt_tokens(_said(call), len(call.messages)), 2 * len(prompt))


def _most_completion(asked_tokens: int | None, num_sequences: int) -> int:
    """Thinking and ends of turns are not always counted in what was asked for."""
    return num_sequences * (MOST_TOKENS if asked_tokens is None else 2 * asked_tokens + 16)


def _said(call: openai.ChatRequest) -> Any:
    """All that a prompt is made of."""
    fields = fields_of(call)
    return [fields["messages"], fields.get("tools"), fields.get("functions")]


def _ids(prompt: Any) -> list[int]:
    return prompt if isinstance(prompt, list) else packed(prompt)
