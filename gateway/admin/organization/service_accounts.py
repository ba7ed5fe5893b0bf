"""The service accounts of a project, each of which is made together with its first key."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin import keys, service_accounts, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Nothing
from gateway.admin.organization import projects
from gateway.admin.organization.api_keys import Scopes, scopes_of
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
)
from gateway.admin.problems import Invalid
from gateway.admin.words import Title, Written

PATH = projects.ONE + "/service_accounts"
FIRST_KEY = "Secret Key"
"""What a key is called to which nobody gave a name."""


class ProjectServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One service account; ``created_at`` in Unix seconds."""

    id: str
    name: str
    role: str
    created_at: int
    object: str = "organization.project.service_account"


class MadeServiceAccountKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key; times in Unix seconds."""

    id: str
    name: str
    created_at: int
    expires_at: int | None
    value: str
    """To be used as bearer key. It is shown here and never again."""
    object: str = "organization.project.service_account.api_key"


class MadeProjectServiceAccount(ProjectServiceAccount, frozen=True, kw_only=True):
    """With its first key, if one was wanted."""

    api_key: MadeServiceAccountKey | None


class NewProjectServiceAccount(Written, frozen=True, kw_only=True):
    """What a service account is made of."""

    name: Title
    create_service_account_only: bool | None = None
    """Without a key."""
    expires_in_seconds: Lifetime | None = None
    """Of the key; null: it does not end."""


class ServiceAccountChange(Written, frozen=True, kw_only=True):
    """What is to change."""

    name: Title | None = None
    role: Literal["member", "owner"] | None = None


class NewServiceAccountKey(Written, frozen=True, kw_only=True):
    """What a further key is made of."""

    name: Title = FIRST_KEY
    scopes: Scopes = ()
    """Empty: everything that the project may do."""
    expires_in_seconds: Lifetime | None = None


async def every(ask: Ask[ListQuery, Nothing]) -> Listing[ProjectServiceAccount]:
    """List the service accounts of a project."""
    columns = store.service_accounts.c
    async with ask.reading() as connection:
        tenant = await tenants.found(connection, ask.named("project_id"))
        statement = sa.select(store.service_accounts)
        statement = statement.where(columns.tenant_id == tenant.id, columns.deleted_at.is_(None))
        return await listed(connection, ask.query, statement, columns.id, _of_row)


async def one(ask: Ask[Nothing, Nothing]) -> ProjectServiceAccount:
    """Read a service account."""
    async with ask.reading() as connection:
        return shaped(await found(connection, ask))


async def create(ask: Ask[Nothing, NewProjectServiceAccount], change: Change) -> MadeProjectServiceAccount:
    """Make a service account and its first key."""
    body = ask.body
    if body.create_service_account_only and body.expires_in_seconds is not None:
        raise Invalid.of([("expires_in_seconds", "there is no key that could end")])
    tenant = await projects.active(change, ask.named("project_id"))
    new = service_accounts.NewServiceAccount(tenant_id=tenant.id, name=body.name)
    account = await service_accounts.create(ours(ask, new), change)
    key = None
    if not body.create_service_account_only:
        key = await _key(ask, change, account, NewServiceAccountKey(expires_in_seconds=body.expires_in_seconds))
    return MadeProjectServiceAccount(**msgspec.structs.asdict(shaped(account)), api_key=key)


async def update(ask: Ask[Nothing, ServiceAccountChange], change: Change) -> ProjectServiceAccount:
    """Rename a service account, or change its role."""
    await projects.active(change, ask.named("project_id"))
    before = await found(change.connection, ask)
    after = msgspec.structs.replace(
        before,
        name=ask.body.name or before.name,
        role=ask.body.role or before.role,
        version=before.version + 1,
    )
    changed = sa.update(store.service_accounts).where(store.service_accounts.c.id == before.id)
    row = {"name": after.name, "role": after.role, "version": after.version, "revision": change.revision}
    await change.connection.execute(changed.values(row))
    await change.record("service_account.updated", "service_account", before.id, before, after)
    return shaped(after)


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> Deleted:
    """Delete a service account and revoke its keys."""
    account = await found(change.connection, ask)
    await service_accounts.delete(ours(ask, service_account_id=account.id), change)
    return Deleted(account.id, "organization.project.service_account.deleted")


async def create_key(ask: Ask[Nothing, NewServiceAccountKey], change: Change) -> MadeServiceAccountKey:
    """Make a further key for a service account."""
    await projects.active(change, ask.named("project_id"))
    return await _key(ask, change, await found(change.connection, ask), ask.body)


async def found(connection: AsyncConnection, ask: Ask[Any, Any]) -> service_accounts.ServiceAccount:
    """One of the project. Raises NotThere."""
    account = await service_accounts.found(connection, ask.named("service_account_id"))
    check_belongs(account.tenant_id == ask.named("project_id"), "service account")
    return account


def shaped(account: service_accounts.ServiceAccount) -> ProjectServiceAccount:
    return ProjectServiceAccount(id=account.id, name=account.name, role=account.role, created_at=account.created_at)


def _of_row(row: sa.Row[Any]) -> ProjectServiceAccount:
    return shaped(service_accounts.shaped(row))


async def _key(
    ask: Ask[Any, Any], change: Change, account: service_accounts.ServiceAccount, asked: NewServiceAccountKey
) -> MadeServiceAccountKey:
    new = keys.NewKey(
        tenant_id=account.tenant_id,
        service_account_id=account.id,
        name=asked.name,
        scopes=scopes_of(asked.scopes),
        expires_at=ends_at(change.at, asked.expires_in_seconds),
    )
    made = await keys.create(ours(ask, new), change)
    return MadeServiceAccountKey(
        id=made.id, name=made.name, created_at=made.created_at, expires_at=made.expires_at, value=made.key
    )


_ONE = PATH + "/{service_account_id}"
ENDPOINTS = [
    OpenAIEndpoint("GET", PATH, every, Listing[ProjectServiceAccount], OPERATORS, query=ListQuery),
    OpenAIEndpoint(
        "POST", PATH, create, MadeProjectServiceAccount, OPERATORS, body=NewProjectServiceAccount, changes=True
    ),
    OpenAIEndpoint("GET", _ONE, one, ProjectServiceAccount, OPERATORS),
    OpenAIEndpoint("POST", _ONE, update, ProjectServiceAccount, OPERATORS, body=ServiceAccountChange, changes=True),
    OpenAIEndpoint("DELETE", _ONE, delete, Deleted, OPERATORS, changes=True),
    OpenAIEndpoint(
        "POST",
        _ONE + "/api_keys",
        create_key,
        MadeServiceAccountKey,
        OPERATORS,
        body=NewServiceAccountKey,
        changes=True,
    ),
]
