"""/v1/models and /v1/models/{model}: what is served here, to Anthropic's clients in their own shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from aiohttp import web
from msgspec import UNSET
from multidict import istr

from gateway import anthropic, failures, openai
from gateway.api.request import query_of
from gateway.dispatch import ServedModel
from gateway.errors import GatewayError, ModelNotFound, PermissionDenied
from gateway.head import HEAD
from gateway.house import GATEWAY, Gateway

ANTHROPIC = istr("anthropic-version")
"""Who sends this is a client of Anthropic's."""


async def every(request: web.Request) -> web.Response:
    if ANTHROPIC in request.headers:
        return _in_anthropics_words(request, _page)
    return _json(openai.ModelList(data=[_shaped(request.app[GATEWAY], model) for model in _usable(request)]))


async def one(request: web.Request) -> web.Response:
    if ANTHROPIC in request.headers:
        return _in_anthropics_words(request, lambda request: _told(request.app[GATEWAY], _asked(request)))
    return _json(_shaped(request.app[GATEWAY], _asked(request)))


async def delete(request: web.Request) -> web.Response:
    """At OpenAI their owner deletes models that were made for them alone. There are none such here: whoever operates
    the server says what is served."""
    name = _asked(request).name
    raise PermissionDenied(
        f"The model `{name}` cannot be deleted by a project's key: models are served, and adapters unloaded, by "
        "whoever operates this server.",
        param="model",
    )


def _usable(request: web.Request) -> list[ServedModel]:
    """Those that the caller may use."""
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for("models", request)
    return [model for model in _served(gw) if caller.policy.may_use(model.name)]


def _asked(request: web.Request) -> ServedModel:
    gw = request.app[GATEWAY]
    name = request.match_info["model"]
    gw.auth.caller_of(request).check(name, "models")
    for model in _served(gw):
        if model.name == name:
            return model
    raise ModelNotFound.named(name)


def _served(gw: Gateway) -> list[ServedModel]:
    return gw.upstreams.models() + gw.dispatch.adapters()


def _shaped(gw: Gateway, model: ServedModel) -> openai.ModelBody:
    return openai.ModelBody(
        id=model.name,
        created=model.created,
        root=model.name,
        max_model_len=_max_model_tokens(gw, model) or UNSET,
        penstock=openai.ModelExtras(state=model.state),
    )


def _page(request: web.Request) -> anthropic.ModelPage:
    gw, query = request.app[GATEWAY], query_of(request, anthropic.ModelQuery)
    return anthropic.page_of([_told(gw, model) for model in _usable(request)], query)


def _told(gw: Gateway, model: ServedModel) -> anthropic.ModelInfo:
    return anthropic.ModelInfo.of(model.name, model.created, _max_model_tokens(gw, model))


def _max_model_tokens(gw: Gateway, model: ServedModel) -> int | None:
    with contextlib.suppress(ModelNotFound):  # one that another server has
        facts = gw.dispatch.ready(model.name)
        return None if facts is None else facts.max_model_tokens
    return None


def _in_anthropics_words(
    request: web.Request, answer: Callable[[web.Request], anthropic.ModelPage | anthropic.ModelInfo]
) -> web.Response:
    """The refusal as well."""
    request_id = request[HEAD].request_id
    try:
        body = answer(request)
    except (GatewayError, openai.Malformed) as error:
        return anthropic.shaped(failures.described(error, request_id), request_id)
    response = _json(body)
    response.headers["request-id"] = request_id
    return response


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
