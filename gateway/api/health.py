"""GET /healthz, for whoever restarts this process, and /readyz, also as /health, for whoever sends it traffic. No key
is needed."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.house import GATEWAY


async def alive(request: web.Request) -> web.Response:
    """200 as long as the event loop turns."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 while a model can answer, if need be as soon as it is loaded, and new requests are let in, else 503 (also
    while the ledger cannot be written); with the state of each model."""
    gw = request.app[GATEWAY]
    models = {model.name: model.state for model in gw.upstreams.models()}
    if gw.dispatch.draining:
        status, code = "draining", 503
    elif not gw.ledger.has_room:
        status, code = "ledger_behind", 503
    elif {"ready", "unloaded", "unloading"} & set(models.values()):
        status, code = "ready", 200
    else:
        status, code = "starting", 503
    body = msgspec.json.encode({"status": status, "models": models})
    return web.Response(status=code, body=body, content_type="application/json")
