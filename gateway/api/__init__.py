"""/v1 and the health of the house: a file for each endpoint. ``chat`` is the whole journey, the others are its
variations."""

from __future__ import annotations

from aiohttp import web

from gateway.api import chat, completions, health, models


def routes() -> list[web.RouteDef]:
    """Everything that is served here."""
    return [
        web.post("/v1/chat/completions", chat.complete),
        web.post("/v1/completions", completions.complete),
        web.get("/v1/models", models.every),
        # A hub id has a slash in it.
        web.get("/v1/models/{model:.+}", models.one),
        web.get("/healthz", health.alive),
        web.get("/readyz", health.ready),
    ]
