"""GET /v1/models and /v1/models/{model}: what is served here."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import openai
from gateway.dispatch import ServedModel
from gateway.errors import ModelNotFound
from gateway.house import GATEWAY, Gateway


async def every(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_of(request)
    caller.check_endpoint("models")
    models = [_shaped(model) for model in _served(gw) if caller.policy.may_use(model.name)]
    return _json(openai.ModelList(data=models))


async def one(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    name = request.match_info["model"]
    gw.auth.caller_of(request).check(name, "models")
    for model in _served(gw):
        if model.name == name:
            return _json(_shaped(model))
    raise ModelNotFound.named(name)


def _served(gw: Gateway) -> list[ServedModel]:
    return gw.dispatch.models() + gw.dispatch.adapters()


def _shaped(model: ServedModel) -> openai.ModelBody:
    return openai.ModelBody(id=model.name, created=model.created, penstock=openai.ModelExtras(state=model.state))


def _json(body: openai.ModelBody | openai.ModelList) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
