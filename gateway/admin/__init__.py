"""/admin/v1: a file for each resource, over the machinery of ``endpoint``, ``change``, ``pages`` and ``problems``; and
``organization``, the same in OpenAI's words."""

from __future__ import annotations

from aiohttp import web

from gateway.admin import (
    adapters,
    admin_keys,
    audit,
    caches,
    exports,
    keys,
    ledger,
    limits,
    live,
    logging,
    models,
    organization,
    organizations,
    policies,
    prices,
    queues,
    requests,
    service_accounts,
    session,
    sinks,
    tenants,
    trial,
    upstreams,
    usage,
    workers,
)
from gateway.admin.endpoint import Endpoint
from gateway.admin.problems import ROOT, shaped

__all__ = ["ENDPOINTS", "ROOT", "routes", "shaped"]

ENDPOINTS: list[Endpoint] = [
    endpoint
    for resource in (
        *(organizations, tenants, service_accounts, keys, admin_keys, limits, policies, prices, trial),
        *(models, adapters, upstreams, usage, workers, live, queues, caches, ledger, requests, logging, audit),
        *(exports, sinks, session, organization),
    )
    for endpoint in resource.ENDPOINTS
]


def routes() -> list[web.RouteDef]:
    """Everything that is served here."""
    return [endpoint.route() for endpoint in ENDPOINTS]
