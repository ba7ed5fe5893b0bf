"""POST /tokenize and /detokenize: texts as a model's tokens and back. Nothing is computed, and nothing is owed."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import head, openai
from gateway.api.chat import MAX_COUNTED, prompt_of
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.house import Gateway


async def tokenize(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    asked = await parsed(openai.parse_tokenize, await taken_body_of(gw, request))
    model, tenant_id = _model_of(gw, caller, asked.model), caller.tenant_id
    text, facts = gw.dispatch.text(model), gw.dispatch.ready(model)
    if asked.prompt is None:
        token_ids = await prompt_of(gw, caller, msgspec.structs.replace(asked.chat, model=model))
    else:
        (token_ids,) = await text.encode(
            [asked.prompt], asked.add_special_tokens is not False, MAX_COUNTED, tenant_id=tenant_id
        )
    body = openai.TokenizeBody(
        count=len(token_ids),
        max_model_len=None if facts is None else facts.max_model_tokens,
        tokens=token_ids,
        token_strs=await text.token_texts(token_ids, tenant_id) if asked.return_token_strs else None,
    )
    return head.Whole.of(body)


async def detokenize(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    asked = await parsed(openai.parse_detokenize, await taken_body_of(gw, request))
    text = gw.dispatch.text(_model_of(gw, caller, asked.model))
    return head.Whole.of(openai.DetokenizeBody(await text.decoded(asked.tokens, caller.tenant_id)))


def _model_of(gw: Gateway, caller: Caller, named: str | None) -> str:
    """Raises Malformed, and what ``check`` raises."""
    if named is None:
        served = [model.name for model in gw.dispatch.models() if caller.policy.may_use(model.name)]
        if len(served) != 1:
            raise openai.Malformed("Missing required parameter: 'model'.", "model", "missing_required_parameter")
        (named,) = served
    caller.check(named, "completions")
    return named
