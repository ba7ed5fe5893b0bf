"""The cache of exact answers: how much is kept, in all and for a tenant, and forgetting what is kept for one."""

from __future__ import annotations

import msgspec

from gateway.admin import policies, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing

PATH = "/admin/v1/caches/exact"


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that are kept."""

    num_entries: int
    num_bytes: int


class TenantContents(Contents, frozen=True, kw_only=True):
    """Answers that are kept for a tenant, those of its sharing group included."""

    tenant_id: str
    sharing_group: str
    """Empty: it shares with nobody."""


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What was forgotten."""

    tenant_id: str
    sharing_group: str
    """Whose other members have lost what was shared, too; empty: none."""
    num_entries: int


async def whole(ask: Ask[Nothing, Nothing]) -> Contents:
    """Read how much is kept, by this gateway or by all that share its Redis."""
    held = await ask.gw.cache.held_in_all()
    return Contents(num_entries=held.num_entries, num_bytes=held.num_bytes)


async def one(ask: Ask[Nothing, Nothing]) -> TenantContents:
    """Read how much is kept for a tenant."""
    async with ask.reading() as connection:
        tenant = await tenants.found(connection, ask.named("tenant_id"))
        cache = (await policies.found(connection, tenant.policy)).document.cache
    held = await ask.gw.cache.held(tenant.id, cache)
    return TenantContents(
        tenant_id=tenant.id,
        sharing_group=cache.sharing_group,
        num_entries=held.num_entries,
        num_bytes=held.num_bytes,
    )


async def flush(ask: Ask[Nothing, Nothing], change: Change) -> Flushed:
    """Forget what is kept for a tenant, and for the group that it shares with."""
    tenant = await tenants.found(change.connection, ask.named("tenant_id"))
    cache = (await policies.found(change.connection, tenant.policy)).document.cache
    num_entries = await ask.gw.cache.flush(tenant.id, cache)
    flushed = Flushed(tenant_id=tenant.id, sharing_group=cache.sharing_group, num_entries=num_entries)
    await change.record("cache.flushed", "tenant", tenant.id, None, flushed)
    return flushed


_ONE = PATH + "/{tenant_id}"
ENDPOINTS = [
    Endpoint("GET", PATH, whole, Contents, OPERATORS),
    Endpoint("GET", _ONE, one, TenantContents, OPERATORS),
    Endpoint("POST", _ONE + "/flush", flush, Flushed, OPERATORS, changes=True),
]
