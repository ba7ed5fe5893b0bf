"""Organizations: whom tenants belong to."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Field, NotThere
from gateway.admin.words import Title, Written
from gateway.store import new_id

PATH = "/admin/v1/organizations"


class Organization(Versioned, frozen=True, kw_only=True):
    """One organization; ``created_at`` in Unix seconds."""

    id: str
    name: str
    created_at: int


class NewOrganization(Written, frozen=True, kw_only=True):
    """What an organization is made of, and all that can be changed of it."""

    name: Title


async def every(ask: Ask[PageQuery, Nothing]) -> Page[Organization]:
    """List organizations."""
    async with ask.reading() as connection:
        return await listed(connection, ask.query, sa.select(store.organizations), store.organizations.c.id, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> Organization:
    """Read an organization."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("organization_id"))


async def create(ask: Ask[Nothing, NewOrganization], change: Change) -> Organization:
    """Make an organization."""
    await _check_free(change.connection, ask.body.name)
    organization = Organization(id=new_id("org"), name=ask.body.name, created_at=change.at, version=1)
    row = {**msgspec.structs.asdict(organization), "revision": change.revision}
    await change.connection.execute(sa.insert(store.organizations), row)
    await change.record("organization.created", "organization", organization.id, None, organization)
    return organization


async def update(ask: Ask[Nothing, NewOrganization], change: Change) -> Organization:
    """Rename an organization."""
    before = await found(change.connection, ask.named("organization_id"))
    ask.check_version(before.version)
    if ask.body.name != before.name:
        await _check_free(change.connection, ask.body.name)
    after = msgspec.structs.replace(before, name=ask.body.name, version=before.version + 1)
    renamed = sa.update(store.organizations).where(store.organizations.c.id == before.id)
    await change.connection.execute(renamed.values(name=after.name, version=after.version, revision=change.revision))
    await change.record("organization.updated", "organization", before.id, before, after)
    return after


async def found(connection: AsyncConnection, organization_id: str) -> Organization:
    """Raises NotThere."""
    query = sa.select(store.organizations).where(store.organizations.c.id == organization_id)
    row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no organization {organization_id}.")
    return shaped(row)


def shaped(row: sa.Row[Any]) -> Organization:
    return Organization(id=row.id, name=row.name, created_at=row.created_at, version=row.version)


async def _check_free(connection: AsyncConnection, name: str) -> None:
    query = sa.select(store.organizations.c.id).where(store.organizations.c.name == name)
    if (taken_by := (await connection.execute(query)).scalar()) is not None:
        raise Conflict(f"The organization {taken_by} has this name already.", [Field("name", "is taken")])


ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Organization], READERS, query=PageQuery),
    Endpoint("POST", PATH, create, Organization, OPERATORS, body=NewOrganization, status=201, changes=True),
    Endpoint("GET", PATH + "/{organization_id}", one, Organization, READERS),
    Endpoint(
        "PATCH",
        PATH + "/{organization_id}",
        update,
        Organization,
        OPERATORS,
        body=NewOrganization,
        changes=True,
        needs_match=True,
    ),
]
