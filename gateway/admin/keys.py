"""Keys of tenants: made, narrowed, rotated with an overlap, revoked. A key itself is in one answer and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import keys, store
from gateway.admin import policies, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
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
from gateway.admin.problems import Conflict, Invalid, NotThere
from gateway.admin.words import Id, Instant, Title, Written
from gateway.store import new_id
from policies import faults
from policies.policy import Narrowing

PATH = "/admin/v1/keys"

Scope = Literal[
    "chat.completions",
    "completions",
    "responses",
    "embeddings",
    "rerank",
    "models",
    "usage",
    "files",
    "batches",
]


class KeyScopes(Written, frozen=True, kw_only=True, omit_defaults=True):
    """What a key is good for; null: all of it."""

    endpoints: Annotated[tuple[Scope, ...], Meta(max_length=16)] | None = None


class Key(KeyOfAnyone, frozen=True, kw_only=True):
    """What is kept of a tenant's key; times in Unix seconds."""

    tenant_id: str
    service_account_id: str | None
    scopes: KeyScopes | None
    narrowing: Narrowing | None


class MadeKey(Key, frozen=True, kw_only=True):
    """A new key, and what is kept of it."""

    key: str
    """To be used as bearer key. It is shown here and never again."""


class NewKey(Written, frozen=True, kw_only=True):
    """What a key is made of."""

    tenant_id: Id
    name: Title
    service_account_id: Id | None = None
    scopes: KeyScopes | None = None
    networks: Networks = ()
    narrowing: Narrowing | None = None
    expires_at: Instant | None = None


class KeyChange(Written, frozen=True, kw_only=True):
    """What is to change; the rest stays."""

    name: Title | UnsetType = UNSET
    scopes: KeyScopes | UnsetType | None = UNSET
    networks: Networks | UnsetType = UNSET
    narrowing: Narrowing | UnsetType | None = UNSET
    expires_at: Instant | UnsetType | None = UNSET


class KeyQuery(PageQuery, frozen=True, kw_only=True):
    tenant_id: Id | None = None
    service_account_id: Id | None = None
    revoked: bool | None = None


async def every(ask: Ask[KeyQuery, Nothing]) -> Page[Key]:
    """List keys of tenants."""
    async with ask.reading() as connection:
        return await page(connection, ask.query)


async def page(connection: AsyncConnection, query: KeyQuery) -> Page[Key]:
    """Raises Invalid."""
    columns = store.keys.c
    statement = sa.select(store.keys).where(columns.kind == "api")
    for name in ("tenant_id", "service_account_id"):
        if (value := getattr(query, name)) is not None:
            statement = statement.where(columns[name] == value)
    if query.revoked is not None:
        statement = statement.where(columns.revoked_at.is_not(None) == query.revoked)
    return await listed(connection, query, statement, columns.id, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> Key:
    """Read what is kept of a key."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("key_id"))


async def create(ask: Ask[Nothing, NewKey], change: Change) -> MadeKey:
    """Make a key for a tenant or for one of its service accounts."""
    body = ask.body
    key = Key(
        id=new_id("key"),
        prefix="",
        last_four="",
        rotated_from=None,
        created_at=change.at,
        revoked_at=None,
        version=1,
        **(msgspec.structs.asdict(body) | {"networks": networks_of(body.networks)}),
    )
    await _check(change, key)
    made = await insert(ask, change, key)
    await change.record("key.created", "key", key.id, None, kept(made))
    return made


async def update(ask: Ask[Nothing, KeyChange], change: Change) -> Key:
    """Change what a key may do, or when it ends."""
    before = await found(change.connection, ask.named("key_id"))
    ask.check_version(before.version)
    if before.revoked_at is not None:
        raise Conflict("A revoked key stays as it is; make a new one.")
    values = {name: value for name, value in msgspec.structs.asdict(ask.body).items() if value is not UNSET}
    if "networks" in values:
        values["networks"] = networks_of(values["networks"])
    after = msgspec.structs.replace(before, **values, version=before.version + 1)
    await _check(change, after, set(values))
    await write(change, after)
    await change.record("key.updated", "key", before.id, before, after)
    return after


async def rotate(ask: Ask[Nothing, Rotation], change: Change) -> MadeKey:
    """Make a key that may do what another may, which ends after an overlap."""
    before = await found(change.connection, ask.named("key_id"))
    ask.check_version(before.version)
    made = await insert(ask, change, await successor(change, before))
    await change.record("key.created", "key", made.id, None, kept(made))
    if ask.body.overlap_s:
        after = ending(before, ask.body.overlap_s, change.at)
        await write(change, after)
        await change.record("key.rotated", "key", before.id, before, after)
    else:
        await revoke_one(change, before)
    return made


async def revoke(ask: Ask[Nothing, Nothing], change: Change) -> Key:
    """Revoke a key: it opens nothing from then on, everywhere within a second."""
    before = await found(change.connection, ask.named("key_id"))
    ask.check_version(before.version)
    return await revoke_one(change, before)


async def revoke_one(change: Change, before: Key) -> Key:
    """The key afterwards."""
    if before.revoked_at is not None:
        change.is_done_already = True
        return before
    after = revoked(before, change.at)
    await write(change, after)
    await change.record("key.revoked", "key", before.id, before, after)
    return after


async def found(connection: AsyncConnection, key_id: str) -> Key:
    """Raises NotThere."""
    columns = store.keys.c
    query = sa.select(store.keys).where(columns.id == key_id, columns.kind == "api")
    row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no key {key_id}.")
    return shaped(row)


def shaped(row: sa.Row[Any]) -> Key:
    values = {name: getattr(row, name) for name in Key.__struct_fields__}
    for name, shape in (("scopes", KeyScopes), ("narrowing", Narrowing), ("networks", tuple[str, ...])):
        values[name] = msgspec.json.decode(values[name], type=shape) if values[name] else None
    values["networks"] = values["networks"] or ()
    return Key(**values)


async def insert(ask: Ask[Any, Any], change: Change, key: Key) -> MadeKey:
    """The key with a secret of its own."""
    secret = keys.new_key()
    trace = keys.kept(ask.gw.directory.secret, secret)
    values = msgspec.structs.asdict(key) | {"prefix": trace.prefix, "last_four": trace.last_four}
    made = MadeKey(**values, key=secret)
    row = _row(kept(made)) | {"kind": "api", "hash": trace.hash, "revision": change.revision}
    await change.connection.execute(sa.insert(store.keys), row)
    return made


async def write(change: Change, key: Key) -> None:
    """The key as it is now."""
    row = _row(key) | {"revision": change.revision}
    await change.connection.execute(sa.update(store.keys).where(store.keys.c.id == key.id).values(row))


def kept(made: MadeKey) -> Key:
    """Without the secret."""
    return Key(**{name: getattr(made, name) for name in Key.__struct_fields__})


async def _check(change: Change, key: Key, changed: set[str] | None = None) -> None:
    """``changed``: the fields to look at, if not all. Raises Invalid."""
    if changed is None or "expires_at" in changed:
        check_ahead(key.expires_at, change.at)
    try:
        tenant = await tenants.found(change.connection, key.tenant_id)
    except NotThere as error:
        raise Invalid.of([("tenant_id", str(error))]) from None
    if changed is None and key.service_account_id is not None:
        columns = store.service_accounts.c
        query = sa.select(columns.id).where(
            columns.id == key.service_account_id, columns.tenant_id == tenant.id, columns.deleted_at.is_(None)
        )
        if (await change.connection.execute(query)).first() is None:
            raise Invalid.of([("service_account_id", f"the tenant has no service account {key.service_account_id}")])
    if key.narrowing is not None and (changed is None or "narrowing" in changed):
        policy = (await policies.found(change.connection, tenant.policy)).document
        if wrong := faults.of_narrowing(key.narrowing, policy):
            raise Invalid.of([(f"narrowing.{path}", what) for path, what in wrong])


def _row(key: Key) -> dict[str, Any]:
    row = msgspec.structs.asdict(key)
    for name in ("scopes", "networks", "narrowing"):
        row[name] = msgspec.json.encode(row[name]).decode() if row[name] else None
    return row


_ONE = PATH + "/{key_id}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Key], OPERATORS, query=KeyQuery),
    Endpoint("POST", PATH, create, MadeKey, OPERATORS, body=NewKey, status=201, changes=True),
    Endpoint("GET", _ONE, one, Key, OPERATORS),
    Endpoint("PATCH", _ONE, update, Key, OPERATORS, body=KeyChange, changes=True, needs_match=True),
    Endpoint("DELETE", _ONE, revoke, Key, OPERATORS, changes=True),
    Endpoint("POST", _ONE + "/rotate", rotate, MadeKey, OPERATORS, body=Rotation, status=201, changes=True),
]
