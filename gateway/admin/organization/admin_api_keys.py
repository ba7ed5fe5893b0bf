"""The keys of the administration, which OpenAI's clients make as owners. Only owners deal in them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin import admin_keys
from gateway.admin.change import Change
from gateway.admin.endpoint import OWNERS, Ask, Nothing
from gateway.admin.organization.shapes import (
    ROOT,
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
from gateway.admin.words import Title, Written

PATH = ROOT + "/admin_api_keys"


class AdminApiKeyOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody but the key itself: there are no users here."""

    id: str
    name: str
    role: str
    created_at: int
    type: str = "user"
    object: str = "organization.user"


class AdminApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an admin key; times in Unix seconds."""

    id: str
    name: str
    redacted_value: str
    owner: AdminApiKeyOwner
    created_at: int
    expires_at: int | None
    last_used_at: int | None = None
    """Not kept."""
    object: str = "organization.admin_api_key"


class MadeAdminApiKey(AdminApiKey, frozen=True, kw_only=True):
    """A new key, and what is kept of it."""

    value: str
    """To be used as bearer key. It is shown here and never again."""


class NewAdminApiKey(Written, frozen=True, kw_only=True):
    """What an admin key is made of."""

    name: Title
    expires_in_seconds: Lifetime | None = None


class AdminApiKeyQuery(ListQuery, frozen=True, kw_only=True):
    order: Literal["asc", "desc"] = "asc"


async def every(ask: Ask[AdminApiKeyQuery, Nothing]) -> Listing[AdminApiKey]:
    """List the admin keys that are not revoked."""
    columns = store.keys.c
    statement = sa.select(store.keys).where(columns.kind == "admin", columns.revoked_at.is_(None))
    async with ask.reading() as connection:
        newest_first = ask.query.order == "desc"
        return await listed(connection, ask.query, statement, columns.id, _of_row, newest_first)


async def one(ask: Ask[Nothing, Nothing]) -> AdminApiKey:
    """Read what is kept of an admin key."""
    async with ask.reading() as connection:
        return shaped(await found(connection, ask))


async def create(ask: Ask[Nothing, NewAdminApiKey], change: Change) -> MadeAdminApiKey:
    """Make an admin key in the role of an owner."""
    new = admin_keys.NewAdminKey(
        name=ask.body.name, role="owner", expires_at=ends_at(change.at, ask.body.expires_in_seconds)
    )
    made = await admin_keys.create(ours(ask, new), change)
    kept = {name: getattr(shaped(made), name) for name in AdminApiKey.__struct_fields__}
    return MadeAdminApiKey(**kept, value=made.key)


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> Deleted:
    """Revoke an admin key."""
    key = await found(change.connection, ask)
    await admin_keys.revoke(ours(ask, key_id=key.id), change)
    return Deleted(key.id, "organization.admin_api_key.deleted")


async def found(connection: AsyncConnection, ask: Ask[Any, Any]) -> admin_keys.AdminKey:
    """One that is not revoked. Raises NotThere."""
    key = await admin_keys.found(connection, ask.named("key_id"))
    check_belongs(key.revoked_at is None, "admin key")
    return key


def shaped(key: admin_keys.AdminKey) -> AdminApiKey:
    return AdminApiKey(
        id=key.id,
        name=key.name,
        redacted_value=redacted(key.prefix, key.last_four),
        owner=AdminApiKeyOwner(id=key.id, name=key.name, role=key.role, created_at=key.created_at),
        created_at=key.created_at,
        expires_at=key.expires_at,
    )


def _of_row(row: sa.Row[Any]) -> AdminApiKey:
    return shaped(admin_keys.shaped(row))


_ONE = PATH + "/{key_id}"
ENDPOINTS = [
    OpenAIEndpoint("GET", PATH, every, Listing[AdminApiKey], OWNERS, query=AdminApiKeyQuery),
    OpenAIEndpoint("POST", PATH, create, MadeAdminApiKey, OWNERS, body=NewAdminApiKey, changes=True),
    OpenAIEndpoint("GET", _ONE, one, AdminApiKey, OWNERS),
    OpenAIEndpoint("DELETE", _ONE, delete, Deleted, OWNERS, changes=True),
]
