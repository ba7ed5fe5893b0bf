"""The audit log: who changed what, from what to what."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.words import Id, Instant

Word = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$(?!\n)")]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change; ``at`` in Unix seconds. ``before`` is null for what was made, ``after`` for what was deleted."""

    id: str
    at: int
    actor_key_id: str
    actor_name: str
    action: str
    object_kind: str
    object_id: str
    before: msgspec.Raw
    after: msgspec.Raw
    request_id: str
    address: str
    """Where the request came from."""


class AuditQuery(PageQuery, frozen=True, kw_only=True):
    actor_key_id: Id | None = None
    action: Word | None = None
    object_kind: Word | None = None
    object_id: Word | None = None
    since: Instant | None = None
    """Unix seconds; entries from then on."""
    until: Instant | None = None
    """Entries before then."""


async def every(ask: Ask[AuditQuery, Nothing]) -> Page[Entry]:
    """List what was changed."""
    columns, statement = store.audit_log.c, sa.select(store.audit_log)
    for name in ("actor_key_id", "action", "object_kind", "object_id"):
        if (value := getattr(ask.query, name)) is not None:
            statement = statement.where(columns[name] == value)
    if ask.query.since is not None:
        statement = statement.where(columns.at >= ask.query.since)
    if ask.query.until is not None:
        statement = statement.where(columns.at < ask.query.until)
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, columns.id, shaped)


def shaped(row: sa.Row[Any]) -> Entry:
    values = dict(row._mapping)
    for side in ("before", "after"):
        values[side] = msgspec.Raw(values[side] or "null")
    return Entry(**values)


ENDPOINTS = [Endpoint("GET", "/admin/v1/audit_log", every, Page[Entry], OPERATORS, query=AuditQuery)]
