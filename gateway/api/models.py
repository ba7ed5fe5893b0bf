"""GET /v1/models and /v1/models/{model}: what is served here."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import openai
from gateway.dispatch import ServedModel
from gateway.errors import ModelNotFound
from gateway.house import GATEWAY


async def every(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    await gw.auth.tenant_of(request)
    return _json(openai.ModelList(data=[_shaped(model) for model in gw.dispatch.models()]))


async def one(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    await gw.auth.tenant_of(request)
    name = request.match_info["model"]
    for model in gw.dispatch.models():
        if model.name == name:
            return _json(_shaped(model))
    raise ModelNotFound(f"The model '{name}' does not exist", param="model")


def _shaped(model: ServedModel) -> openai.ModelBody:
    return openai.ModelBody(id=model.name, created=model.created)


def _json(body: openai.ModelBody | openai.ModelList) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
