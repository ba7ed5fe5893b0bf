"""Policies: named documents, each change of which is a new version. What tenants go by is the version that is current;
an older one becomes current again as a new version, so history is only ever added to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Field, Invalid, NotThere
from gateway.admin.words import Note, Written
from policies import faults
from policies.policy import Name, Policy

PATH = "/admin/v1/policies"
MAX_DOCUMENT_BYTES = 256 << 10


class PolicyVersion(Versioned, frozen=True, kw_only=True):
    """One version of a policy, which is never changed; ``created_at`` in Unix seconds, ``created_by`` a key's id, and
    ``created_by_name`` what it is called: empty for those of the settings."""

    name: str
    current: bool
    document: Policy
    created_at: int
    created_by: str
    created_by_name: str
    note: str


class NewPolicy(Written, frozen=True, kw_only=True):
    """The first version of a policy."""

    name: Name
    document: Policy
    note: Note = ""


class NewDocument(Written, frozen=True, kw_only=True):
    """The next version of a policy, as a whole."""

    document: Policy
    note: Note = ""


class Rollback(Written, frozen=True, kw_only=True):
    """The version whose document is to count again."""

    version: Annotated[int, Meta(ge=1, le=2**53)]
    note: Note = ""


async def every(ask: Ask[PageQuery, Nothing]) -> Page[PolicyVersion]:
    """List policies, each by its current version."""
    heads = store.policy_heads.c
    statement = _versions().where(store.policies.c.version == heads.current_version, heads.deleted_at.is_(None))
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, store.policies.c.name, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> PolicyVersion:
    """Read the current version of a policy."""
    async with ask.reading() as connection:
        return await found(connection, ask.named("name"))


async def versions(ask: Ask[PageQuery, Nothing]) -> Page[PolicyVersion]:
    """List all versions of a policy."""
    name = ask.named("name")
    async with ask.reading() as connection:
        await found(connection, name)
        statement = _versions().where(store.policies.c.name == name)
        return await listed(connection, ask.query, statement, store.policies.c.version, shaped)


async def version(ask: Ask[Nothing, Nothing]) -> PolicyVersion:
    """Read one version of a policy."""
    number = ask.named("version")
    if not number.isdecimal() or len(number) > 15:
        raise NotThere("The version of a policy is a whole number.")
    async with ask.reading() as connection:
        return await found(connection, ask.named("name"), int(number))


async def create(ask: Ask[Nothing, NewPolicy], change: Change) -> PolicyVersion:
    """Make a policy."""
    name = ask.body.name
    heads = store.policy_heads.c
    head = (await change.connection.execute(sa.select(store.policy_heads).where(heads.name == name))).first()
    if head is not None and head.deleted_at is None and head.current_version:
        raise Conflict(f"There is a policy {name} already; PUT makes a new version of it.", [Field("name", "is taken")])
    _check(ask, ask.body.document)
    if head is None:
        row = {"name": name, "current_version": 0, "revision": change.revision}
        await change.connection.execute(sa.insert(store.policy_heads), row)
    return await _write(ask, change, name, None, ask.body.document, ask.body.note, "policy.created")


async def update(ask: Ask[Nothing, NewDocument], change: Change) -> PolicyVersion:
    """Make a new version of a policy, which counts at once."""
    before = await found(change.connection, ask.named("name"))
    ask.check_version(before.version)
    _check(ask, ask.body.document)
    return await _write(ask, change, before.name, before, ask.body.document, ask.body.note, "policy.updated")


async def rollback(ask: Ask[Nothing, Rollback], change: Change) -> PolicyVersion:
    """Let an older version of a policy count again, as a new version."""
    before = await found(change.connection, ask.named("name"))
    ask.check_version(before.version)
    try:
        older = await found(change.connection, before.name, ask.body.version)
    except NotThere:
        raise Invalid.of([("version", f"the policy {before.name} has no version {ask.body.version}")]) from None
    _check(ask, older.document)
    note = ask.body.note or f"as version {older.version}"
    return await _write(ask, change, before.name, before, older.document, note, "policy.rolled_back")


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> PolicyVersion:
    """Delete a policy that no tenant has; its versions stay readable in the audit log."""
    before = await found(change.connection, ask.named("name"))
    ask.check_version(before.version)
    users = sa.select(store.tenants.c.id).where(store.tenants.c.policy == before.name).limit(6)
    ids = (await change.connection.execute(users)).scalars().all()
    if ids:
        others = " and others" if len(ids) > 5 else ""
        raise Conflict(
            f"The policy {before.name} is that of {', '.join(ids[:5])}{others}. Give them another one first, or make a"
            " new version of this one."
        )
    heads = store.policy_heads
    gone = sa.update(heads).where(heads.c.name == before.name)
    await change.connection.execute(gone.values(deleted_at=change.at, revision=change.revision))
    await change.record("policy.deleted", "policy", before.name, before, None)
    return msgspec.structs.replace(before, current=False)


async def found(connection: AsyncConnection, name: str, number: int | None = None) -> PolicyVersion:
    """The current version, or the one with this number. Raises NotThere."""
    heads, columns = store.policy_heads.c, store.policies.c
    wanted = heads.current_version if number is None else number
    query = _versions().where(columns.name == name, columns.version == wanted, heads.deleted_at.is_(None))
    row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no policy {name}." if number is None else f"There is no version {number} of {name}.")
    return shaped(row)


async def of_tenants(connection: AsyncConnection, ids: Collection[str]) -> dict[str, Policy]:
    """The documents that count for these tenants, by their ids."""
    heads, owners = store.policy_heads.c, store.tenants
    query = _versions().add_columns(owners.c.id).join(owners, owners.c.policy == heads.name)
    query = query.where(store.policies.c.version == heads.current_version, owners.c.id.in_(ids))
    return {row.id: shaped(row).document for row in await connection.execute(query)}


def shaped(row: sa.Row[Any]) -> PolicyVersion:
    return PolicyVersion(
        name=row.name,
        version=row.version,
        current=row.version == row.current_version,
        document=msgspec.json.decode(row.document, type=Policy),
        created_at=row.created_at,
        created_by=row.created_by,
        created_by_name=row.created_by_name,
        note=row.note,
    )


def _versions() -> sa.Select[Any]:
    heads, makers = store.policy_heads, store.keys
    name = sa.func.coalesce(makers.c.name, "").label("created_by_name")
    return (
        sa.select(store.policies, heads.c.current_version, name)
        .join(heads, heads.c.name == store.policies.c.name)
        .outerjoin(makers, makers.c.id == store.policies.c.created_by)
    )


def _check(ask: Ask[Any, Any], document: Policy) -> None:
    """Raises Invalid."""
    found = [(f"document.{path}", what) for path, what in faults.of_policy(document, ask.gw.settings.classes)]
    if not found and len(msgspec.json.encode(document)) > MAX_DOCUMENT_BYTES:
        found = [("document", f"has more than {MAX_DOCUMENT_BYTES} bytes")]
    if found:
        raise Invalid.of(found)


async def _write(
    ask: Ask[Any, Any],
    change: Change,
    name: str,
    before: PolicyVersion | None,
    document: Policy,
    note: str,
    action: str,
) -> PolicyVersion:
    """The next version, current from now on. A name that is used again after a deletion goes on counting."""
    heads, columns = store.policy_heads, store.policies.c
    newest = sa.select(sa.func.max(columns.version)).where(columns.name == name)
    after = PolicyVersion(
        name=name,
        version=((await change.connection.execute(newest)).scalar() or 0) + 1,
        current=True,
        document=document,
        created_at=change.at,
        created_by=ask.caller.key_id,
        created_by_name=ask.caller.name,
        note=note,
    )
    row = msgspec.structs.asdict(after) | {"document": msgspec.json.encode(document).decode()}
    del row["current"], row["created_by_name"]
    await change.connection.execute(sa.insert(store.policies), row)
    head = {"current_version": after.version, "deleted_at": None, "revision": change.revision}
    await change.connection.execute(sa.update(heads).where(heads.c.name == name).values(head))
    await change.record(action, "policy", name, before, after)
    return after


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[PolicyVersion], READERS, query=PageQuery),
    Endpoint("POST", PATH, create, PolicyVersion, OPERATORS, body=NewPolicy, status=201, changes=True),
    Endpoint("GET", _ONE, one, PolicyVersion, READERS),
    Endpoint("PUT", _ONE, update, PolicyVersion, OPERATORS, body=NewDocument, changes=True, needs_match=True),
    Endpoint("DELETE", _ONE, delete, PolicyVersion, OPERATORS, changes=True),
    Endpoint("GET", _ONE + "/versions", versions, Page[PolicyVersion], READERS, query=PageQuery),
    Endpoint("GET", _ONE + "/versions/{version}", version, PolicyVersion, READERS),
    Endpoint("POST", _ONE + "/rollback", rollback, PolicyVersion, OPERATORS, body=Rollback, changes=True),
]
