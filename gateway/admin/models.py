"""The models that are served: the settings say which, so there is nothing to change here."""

from __future__ import annotations

import msgspec

from gateway.admin.endpoint import READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model; ``created_at`` in Unix seconds: when this gateway began to serve it."""

    name: str
    source: str
    ready: bool
    """One of its workers can answer."""
    created_at: int
    replicas: int
    """Workers that are started for it here."""
    addresses: tuple[str, ...]
    """Workers of it that run elsewhere."""


async def every(ask: Ask[Nothing, Nothing]) -> Page[Model]:
    """List the models that are served, all on one page."""
    configured = ask.gw.settings.models
    models = [
        Model(
            name=served.name,
            source=configured[served.name].source,
            ready=served.ready,
            created_at=served.created,
            replicas=configured[served.name].replicas,
            addresses=configured[served.name].addresses,
        )
        for served in ask.gw.dispatch.models()
    ]
    return Page(models, False, None)


ENDPOINTS = [Endpoint("GET", "/admin/v1/models", every, Page[Model], READERS)]
