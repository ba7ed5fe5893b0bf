"""The API keys of a project. They are made by its service accounts, or by /admin/v1/keys."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin import keys, service_accounts, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Nothing
from gateway.admin.organization import projects
from gateway.admin.organization.shapes import (
    Deleted,
    Lifetime,
    Listing,
    ListQuery,
    OpenAIEndpoint,
    check_belongs,
    ends_at,
    listed,
    ours,
    redacted,
)
from gateway.admin.problems import Invalid
from gateway.admin.words import Written

PATH = projects.ONE + "/api_keys"

GENERATING = ("chat.completions", "completions", "responses", "embeddings", "rerank")
READING = ("models",)
SCOPES: dict[str, tuple[str, ...]] = {
    "chat.completions": ("chat.completions",),
    "completions": ("completions",),
    "responses": ("responses",),
    "models": READING,
    "usage": ("usage",),
    "files": ("files",),
    "batches": ("batches",),
    "embeddings": ("embeddings",),
    "rerank": ("rerank",),
    "api.usage.read": ("usage",),
    "api.model.request": GENERATING,
    "model.request": GENERATING,
    "api.model.read": READING,
    "model.read": READING,
    "api.all.read": READING,
}
"""By which names a key's endpoints are given to it: our own and OpenAI's."""
Scopes = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=16)]


class ServiceAccountOwner(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: str
    created_at: int


class ApiKeyOwner(msgspec.Struct, frozen=True, kw_only=True):
    """A service account, or the project as a whole: then nothing is named."""

    type: str | None
    service_account: ServiceAccountOwner | None
    user: None = None


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key; times in Unix seconds."""

    id: str
    name: str
    redacted_value: str
    owner: ApiKeyOwner
    owner_project_access: str
    """ "active", or "inactive" in a project that is archived."""
    created_at: int
    expires_at: int | None
    last_used_at: int | None = None
    """Not kept."""
    object: str = "organization.project.api_key"


class ApiKeyQuery(ListQuery, frozen=True, kw_only=True):
    owner_project_access: Literal["active", "inactive", "any"] = "any"


class ApiKeyChange(Written, frozen=True, kw_only=True):
    """What is to change."""

    scopes: Scopes | UnsetType = UNSET
    """Empty: everything that the project may do."""
    expires_in_seconds: Lifetime | UnsetType = UNSET


async def every(ask: Ask[ApiKeyQuery, Nothing]) -> Listing[ApiKey]:
    """List the keys of a project that are not revoked."""
    columns = store.keys.c
    async with ask.reading() as connection:
        tenant = await tenants.found(connection, ask.named("project_id"))
        accounts = await _accounts(connection, tenant)
        statement = sa.select(store.keys).where(columns.tenant_id == tenant.id, columns.revoked_at.is_(None))
        if ask.query.owner_project_access not in ("any", _access(tenant)):
            statement = statement.where(sa.false())
        return await listed(
            connection, ask.query, statement, columns.id, lambda row: shaped(keys.shaped(row), tenant, accounts)
        )


async def one(ask: Ask[Nothing, Nothing]) -> ApiKey:
    """Read what is kept of a key."""
    async with ask.reading() as connection:
        return await _shown(connection, await found(connection, ask))


async def update(ask: Ask[Nothing, ApiKeyChange], change: Change) -> ApiKey:
    """Change what a key may do, or when it ends."""
    await projects.active(change, ask.named("project_id"))
    before = await found(change.connection, ask)
    expires_in, scopes = ask.body.expires_in_seconds, ask.body.scopes
    values = keys.KeyChange(
        expires_at=UNSET if expires_in is UNSET else ends_at(change.at, expires_in),
        scopes=UNSET if scopes is UNSET else scopes_of(scopes),
    )
    return await _shown(change.connection, await keys.update(ours(ask, values, key_id=before.id), change))


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> Deleted:
    """Revoke a key: it opens nothing from then on."""
    key = await found(change.connection, ask)
    await keys.revoke(ours(ask, key_id=key.id), change)
    return Deleted(key.id, "organization.project.api_key.deleted")


async def found(connection: AsyncConnection, ask: Ask[Nothing, Nothing] | Ask[Nothing, ApiKeyChange]) -> keys.Key:
    """A key of the project that is not revoked. Raises NotThere."""
    key = await keys.found(connection, ask.named("api_key_id"))
    check_belongs(key.tenant_id == ask.named("project_id") and key.revoked_at is None, "API key")
    return key


def scopes_of(names: tuple[str, ...]) -> keys.KeyScopes | None:
    """None for all. Raises Invalid."""
    if unknown := [name for name in names if name not in SCOPES]:
        raise Invalid.of([("scopes", f"there is no scope {unknown[0]}; those that there are: {', '.join(SCOPES)}")])
    endpoints = tuple(sorted({endpoint for name in names for endpoint in SCOPES[name]}))
    return msgspec.convert({"endpoints": endpoints}, keys.KeyScopes) if endpoints else None


def shaped(key: keys.Key, tenant: tenants.Tenant, accounts: dict[str, service_accounts.ServiceAccount]) -> ApiKey:
    account = accounts.get(key.service_account_id or "")
    owner = None
    if account is not None:
        owner = ServiceAccountOwner(id=account.id, name=account.name, role=account.role, created_at=account.created_at)
    return ApiKey(
        id=key.id,
        name=key.name,
        redacted_value=redacted(key.prefix, key.last_four),
        owner=ApiKeyOwner(type="service_account" if owner else None, service_account=owner),
        owner_project_access=_access(tenant),
        created_at=key.created_at,
        expires_at=key.expires_at,
    )


async def _shown(connection: AsyncConnection, key: keys.Key) -> ApiKey:
    tenant = await tenants.found(connection, key.tenant_id)
    return shaped(key, tenant, await _accounts(connection, tenant))


async def _accounts(connection: AsyncConnection, tenant: tenants.Tenant) -> dict[str, service_accounts.ServiceAccount]:
    """The project's, by id."""
    query = sa.select(store.service_accounts).where(store.service_accounts.c.tenant_id == tenant.id)
    return {row.id: service_accounts.shaped(row) for row in await connection.execute(query)}


def _access(tenant: tenants.Tenant) -> str:
    return "active" if tenant.disabled_at is None else "inactive"


_ONE = PATH + "/{api_key_id}"
ENDPOINTS = [
    OpenAIEndpoint("GET", PATH, every, Listing[ApiKey], OPERATORS, query=ApiKeyQuery),
    OpenAIEndpoint("GET", _ONE, one, ApiKey, OPERATORS),
    OpenAIEndpoint("POST", _ONE, update, ApiKey, OPERATORS, body=ApiKeyChange, changes=True),
    OpenAIEndpoint("DELETE", _ONE, delete, Deleted, OPERATORS, changes=True),
]
