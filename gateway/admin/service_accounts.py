"""Service accounts: the programs of a tenant, each with keys of its own."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin import keys, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Invalid, NotThere
from gateway.admin.words import Id, Title, Written
from gateway.store import new_id

PATH = "/admin/v1/service_accounts"


class ServiceAccount(Versioned, frozen=True, kw_only=True):
    """One service account; times in Unix seconds."""

    id: str
    tenant_id: str
    name: str
    role: Literal["owner", "member"]
    created_at: int
    deleted_at: int | None


class NewServiceAccount(Written, frozen=True, kw_only=True):
    """What a service account is made of."""

    tenant_id: Id
    name: Title
    role: Literal["owner", "member"] = "member"


class ServiceAccountQuery(PageQuery, frozen=True, kw_only=True):
    tenant_id: Id | None = None


async def every(ask: Ask[ServiceAccountQuery, Nothing]) -> Page[ServiceAccount]:
    """List service accounts, without the deleted ones."""
    columns = store.service_accounts.c
    statement = sa.select(store.service_accounts).where(columns.deleted_at.is_(None))
    if ask.query.tenant_id is not None:
        statement = statement.where(columns.tenant_id == ask.query.tenant_id)
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, columns.id, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> ServiceAccount:
    """Read a service account."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("service_account_id"))


async def create(ask: Ask[Nothing, NewServiceAccount], change: Change) -> ServiceAccount:
    """Make a service account."""
    try:
        await tenants.found(change.connection, ask.body.tenant_id)
    except NotThere as error:
        raise Invalid.of([("tenant_id", str(error))]) from None
    account = ServiceAccount(
        id=new_id("svc"),
        tenant_id=ask.body.tenant_id,
        name=ask.body.name,
        role=ask.body.role,
        created_at=change.at,
        deleted_at=None,
        version=1,
    )
    row = msgspec.structs.asdict(account) | {"revision": change.revision}
    await change.connection.execute(sa.insert(store.service_accounts), row)
    await change.record("service_account.created", "service_account", account.id, None, account)
    return account


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> ServiceAccount:
    """Delete a service account and revoke its keys."""
    before = await found(change.connection, ask.named("service_account_id"))
    ask.check_version(before.version)
    after = msgspec.structs.replace(before, deleted_at=before.deleted_at or change.at, version=before.version + 1)
    marked = sa.update(store.service_accounts).where(store.service_accounts.c.id == before.id)
    row = {"deleted_at": after.deleted_at, "version": after.version, "revision": change.revision}
    await change.connection.execute(marked.values(row))
    await change.record("service_account.deleted", "service_account", before.id, before, after)
    columns = store.keys.c
    theirs = sa.select(store.keys).where(columns.service_account_id == before.id, columns.revoked_at.is_(None))
    for key in (await change.connection.execute(theirs)).all():
        await keys.revoke_one(change, keys.shaped(key))
    return after


async def found(connection: AsyncConnection, account_id: str) -> ServiceAccount:
    """Raises NotThere, also for one that is deleted."""
    columns = store.service_accounts.c
    query = sa.select(store.service_accounts).where(columns.id == account_id, columns.deleted_at.is_(None))
    row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no service account {account_id}.")
    return shaped(row)


def shaped(row: sa.Row[Any]) -> ServiceAccount:
    return ServiceAccount(
        **{name: getattr(row, name) for name in ServiceAccount.__struct_fields__}  # the columns, name by name
    )


_ONE = PATH + "/{service_account_id}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[ServiceAccount], OPERATORS, query=ServiceAccountQuery),
    Endpoint("POST", PATH, create, ServiceAccount, OPERATORS, body=NewServiceAccount, status=201, changes=True),
    Endpoint("GET", _ONE, one, ServiceAccount, OPERATORS),
    Endpoint("DELETE", _ONE, delete, ServiceAccount, OPERATORS, changes=True),
]
