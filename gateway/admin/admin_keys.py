"""Keys of the administration itself, apart from those of tenants: each has a role, and only owners deal in them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import keys, store
from gateway.admin.change import Change
from gateway.admin.endpoint import OWNERS, Ask, Endpoint, Nothing
from gateway.admin.keys_of_anyone import (
    KeyOfAnyone,
    Networks,
    Rotation,
    check_ahead,
    ending,
    networks_of,
    revoked,
    successor,
)
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, NotThere
from gateway.admin.words import Instant, Title, Written
from gateway.store import new_id

PATH = "/admin/v1/admin_keys"
Role = Literal["owner", "operator", "billing_reader"]


class AdminKey(KeyOfAnyone, frozen=True, kw_only=True):
    """What is kept of an admin key; times in Unix seconds."""

    role: Role


class MadeAdminKey(AdminKey, frozen=True, kw_only=True):
    """A new key, and what is kept of it."""

    key: str
    """To be used as bearer key. It is shown here and never again."""


class NewAdminKey(Written, frozen=True, kw_only=True):
    """What an admin key is made of."""

    name: Title
    role: Role
    networks: Networks = ()
    expires_at: Instant | None = None


class AdminKeyQuery(PageQuery, frozen=True, kw_only=True):
    role: Role | None = None
    revoked: bool | None = None


async def every(ask: Ask[AdminKeyQuery, Nothing]) -> Page[AdminKey]:
    """List admin keys."""
    columns = store.keys.c
    statement = sa.select(store.keys).where(columns.kind == "admin")
    if ask.query.role is not None:
        statement = statement.where(columns.role == ask.query.role)
    if ask.query.revoked is not None:
        statement = statement.where(columns.revoked_at.is_not(None) == ask.query.revoked)
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, columns.id, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> AdminKey:
    """Read what is kept of an admin key."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("key_id"))


async def create(ask: Ask[Nothing, NewAdminKey], change: Change) -> MadeAdminKey:
    """Make an admin key."""
    check_ahead(ask.body.expires_at, change.at)
    return await _insert(
        ask,
        change,
        AdminKey(
            id=new_id("key"),
            prefix="",
            last_four="",
            rotated_from=None,
            created_at=change.at,
            revoked_at=None,
            version=1,
            **(msgspec.structs.asdict(ask.body) | {"networks": networks_of(ask.body.networks)}),
        ),
    )


async def rotate(ask: Ask[Nothing, Rotation], change: Change) -> MadeAdminKey:
    """Make an admin key that may do what another may, which ends after an overlap."""
    before = await found(change.connection, ask.named("key_id"))
    ask.check_version(before.version)
    made = await _insert(ask, change, await successor(change, before))
    if ask.body.overlap_s:
        after = ending(before, ask.body.overlap_s, change.at)
        await _write(change, after)
        await change.record("admin_key.rotated", "admin_key", before.id, before, after)
    else:
        await _revoke(change, before)
    return made


async def revoke(ask: Ask[Nothing, Nothing], change: Change) -> AdminKey:
    """Revoke an admin key, unless it is the last one of an owner."""
    before = await found(change.connection, ask.named("key_id"))
    ask.check_version(before.version)
    columns = store.keys.c
    others = sa.select(columns.id).where(
        columns.role == "owner",
        columns.id != before.id,
        columns.revoked_at.is_(None),
        columns.expires_at.is_(None),
    )
    if before.role == "owner" and (await change.connection.execute(others.limit(1))).first() is None:
        raise Conflict("No owner's key without an end would be left. Make another one first.")
    return await _revoke(change, before)


async def found(connection: AsyncConnection, key_id: str) -> AdminKey:
    """Raises NotThere."""
    columns = store.keys.c
    query = sa.select(store.keys).where(columns.id == key_id, columns.kind == "admin")
    row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no admin key {key_id}.")
    return shaped(row)


def shaped(row: sa.Row[Any]) -> AdminKey:
    values = {name: getattr(row, name) for name in AdminKey.__struct_fields__}
    values["networks"] = msgspec.json.decode(values["networks"] or "[]", type=tuple[str, ...])
    return AdminKey(**values)


async def _insert(ask: Ask[Any, Any], change: Change, key: AdminKey) -> MadeAdminKey:
    secret = keys.new_admin_key()
    trace = keys.kept(ask.gw.directory.secret, secret)
    key = msgspec.structs.replace(key, prefix=trace.prefix, last_four=trace.last_four)
    row = _row(key) | {"kind": "admin", "hash": trace.hash, "revision": change.revision}
    await change.connection.execute(sa.insert(store.keys), row)
    await change.record("admin_key.created", "admin_key", key.id, None, key)
    return MadeAdminKey(**msgspec.structs.asdict(key), key=secret)


async def _revoke(change: Change, before: AdminKey) -> AdminKey:
    if before.revoked_at is not None:
        change.is_done_already = True
        return before
    after = revoked(before, change.at)
    await _write(change, after)
    await change.record("admin_key.revoked", "admin_key", before.id, before, after)
    return after


async def _write(change: Change, key: AdminKey) -> None:
    row = _row(key) | {"revision": change.revision}
    await change.connection.execute(sa.update(store.keys).where(store.keys.c.id == key.id).values(row))


def _row(key: AdminKey) -> dict[str, Any]:
    networks = msgspec.json.encode(key.networks).decode() if key.networks else None
    return msgspec.structs.asdict(key) | {"networks": networks}


_ONE = PATH + "/{key_id}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[AdminKey], OWNERS, query=AdminKeyQuery),
    Endpoint("POST", PATH, create, MadeAdminKey, OWNERS, body=NewAdminKey, status=201, changes=True),
    Endpoint("GET", _ONE, one, AdminKey, OWNERS),
    Endpoint("DELETE", _ONE, revoke, AdminKey, OWNERS, changes=True),
    Endpoint("POST", _ONE + "/rotate", rotate, MadeAdminKey, OWNERS, body=Rotation, status=201, changes=True),
]
