"""Tenants: the teams that requests are made for, and who pays. A tenant is disabled rather than deleted: its ledger
stays."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Field, Invalid, NotThere
from gateway.admin.words import Id, Metadata, Title, Written
from gateway.store import new_id
from policies.policy import Name

PATH = "/admin/v1/tenants"


class Tenant(Versioned, frozen=True, kw_only=True):
    """One tenant; times in Unix seconds. None of the keys of a disabled one opens anything."""

    id: str
    organization_id: str
    name: str
    policy: str
    metadata: dict[str, str]
    created_at: int
    disabled_at: int | None


class NewTenant(Written, frozen=True, kw_only=True):
    """What a tenant is made of."""

    name: Title
    organization_id: Id | None = None
    """None: the only organization there is."""
    policy: Name = "default"
    metadata: Metadata = msgspec.field(default_factory=dict)
    """Of use to people alone."""


class TenantChange(Written, frozen=True, kw_only=True):
    """What is to change; the rest stays."""

    name: Title | UnsetType = UNSET
    organization_id: Id | UnsetType = UNSET
    policy: Name | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class TenantQuery(PageQuery, frozen=True, kw_only=True):
    organization_id: Id | None = None
    name: Title | None = None
    policy: Name | None = None
    disabled: bool | None = None


async def every(ask: Ask[TenantQuery, Nothing]) -> Page[Tenant]:
    """List tenants."""
    query, columns = ask.query, store.tenants.c
    statement = sa.select(store.tenants)
    for column, value in ((columns.organization_id, query.organization_id), (columns.name, query.name)):
        if value is not None:
            statement = statement.where(column == value)
    if query.policy is not None:
        statement = statement.where(columns.policy == query.policy)
    if query.disabled is not None:
        statement = statement.where(columns.disabled_at.is_not(None) == query.disabled)
    async with ask.reading() as connection:
        return await listed(connection, query, statement, columns.id, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> Tenant:
    """Read a tenant."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("tenant_id"))


async def create(ask: Ask[Nothing, NewTenant], change: Change) -> Tenant:
    """Make a tenant."""
    connection, body = change.connection, ask.body
    await _check_free(connection, body.name)
    await _check_policy(connection, body.policy)
    tenant = Tenant(
        id=new_id("ten"),
        organization_id=await _organization(connection, body.organization_id),
        name=body.name,
        policy=body.policy,
        metadata=body.metadata,
        created_at=change.at,
        disabled_at=None,
        version=1,
    )
    await connection.execute(sa.insert(store.tenants), {**_row(tenant), "revision": change.revision})
    await change.record("tenant.created", "tenant", tenant.id, None, tenant)
    return tenant


async def update(ask: Ask[Nothing, TenantChange], change: Change) -> Tenant:
    """Change a tenant, or disable it, or enable it again."""
    connection, body = change.connection, ask.body
    before = await found(connection, ask.named("tenant_id"))
    ask.check_version(before.version)
    values = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}
    if values.get("name", before.name) != before.name:
        await _check_free(connection, values["name"])
    if "policy" in values:
        await _check_policy(connection, values["policy"])
    if "organization_id" in values:
        await _organization(connection, values["organization_id"])
    if (disabled := values.pop("disabled", None)) is not None:
        values["disabled_at"] = (before.disabled_at or change.at) if disabled else None
    after = msgspec.structs.replace(before, **values, version=before.version + 1)
    changed = sa.update(store.tenants).where(store.tenants.c.id == before.id)
    await connection.execute(changed.values({**_row(after), "revision": change.revision}))
    action = "tenant.updated"
    if (before.disabled_at is None) != (after.disabled_at is None):
        action = "tenant.enabled" if after.disabled_at is None else "tenant.disabled"
    await change.record(action, "tenant", before.id, before, after)
    return after


async def found(connection: AsyncConnection, tenant_id: str) -> Tenant:
    """Raises NotThere."""
    row = (await connection.execute(sa.select(store.tenants).where(store.tenants.c.id == tenant_id))).first()
    if row is None:
        raise NotThere(f"There is no tenant {tenant_id}.")
    return shaped(row)


def shaped(row: sa.Row[Any]) -> Tenant:
    return Tenant(
        id=row.id,
        organization_id=row.organization_id,
        name=row.name,
        policy=row.policy,
        metadata=msgspec.json.decode(row.metadata, type=dict[str, str]),
        created_at=row.created_at,
        disabled_at=row.disabled_at,
        version=row.version,
    )


def _row(tenant: Tenant) -> dict[str, Any]:
    return {**msgspec.structs.asdict(tenant), "metadata": msgspec.json.encode(tenant.metadata).decode()}


async def _check_free(connection: AsyncConnection, name: str) -> None:
    query = sa.select(store.tenants.c.id).where(store.tenants.c.name == name)
    if (taken_by := (await connection.execute(query)).scalar()) is not None:
        raise Conflict(f"The tenant {taken_by} has this name already.", [Field("name", "is taken")])


async def _check_policy(connection: AsyncConnection, name: str) -> None:
    heads = store.policy_heads.c
    query = sa.select(heads.name).where(heads.name == name, heads.deleted_at.is_(None), heads.current_version > 0)
    if (await connection.execute(query)).first() is None:
        raise Invalid.of([("policy", f"there is no policy {name}; make it first")])


async def _organization(connection: AsyncConnection, organization_id: str | None) -> str:
    """The organization that is meant."""
    query = sa.select(store.organizations.c.id).limit(2)
    if organization_id is not None:
        query = query.where(store.organizations.c.id == organization_id)
    ids = (await connection.execute(query)).scalars().all()
    if organization_id is not None and not ids:
        raise Invalid.of([("organization_id", f"there is no organization {organization_id}")])
    if len(ids) != 1:
        raise Invalid.of([("organization_id", "is required, since there are several organizations")])
    organization: str = ids[0]
    return organization


ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Tenant], READERS, query=TenantQuery),
    Endpoint("POST", PATH, create, Tenant, OPERATORS, body=NewTenant, status=201, changes=True),
    Endpoint("GET", PATH + "/{tenant_id}", one, Tenant, READERS),
    Endpoint(
        "PATCH",
        PATH + "/{tenant_id}",
        update,
        Tenant,
        OPERATORS,
        body=TenantChange,
        changes=True,
        needs_match=True,
    ),
]
