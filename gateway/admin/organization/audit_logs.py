"""The audit log in OpenAI's words. What OpenAI has no word for keeps ours."""

from __future__ import annotations

from operator import ge, gt, le, lt
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType, field

from gateway import store
from gateway.admin.audit import Word
from gateway.admin.endpoint import OPERATORS, Ask, Nothing
from gateway.admin.organization.shapes import ROOT, Listing, ListQuery, OpenAIEndpoint, listed
from gateway.admin.words import Id, Instant

TYPES = {
    "tenant.created": "project.created",
    "tenant.updated": "project.updated",
    "tenant.enabled": "project.updated",
    "tenant.disabled": "project.archived",
    "key.created": "api_key.created",
    "key.updated": "api_key.updated",
    "key.rotated": "api_key.updated",
    "key.revoked": "api_key.deleted",
    "organization.created": "organization.updated",
    "admin_key.created": "tenant.admin_api_key.created",
    "admin_key.rotated": "tenant.admin_api_key.updated",
    "admin_key.revoked": "tenant.admin_api_key.deleted",
    "policy.created": "tenant.policy.created",
    "policy.updated": "tenant.policy.updated",
    "policy.rolled_back": "tenant.policy.updated",
    "policy.deleted": "tenant.policy.deleted",
}
"""OpenAI's event for our action; the others have the same name. (Its "tenant" is whoever has the organization.)"""
Ids = Annotated[tuple[Word, ...], Meta(max_length=100)]


class ApiKeyActor(msgspec.Struct, frozen=True):
    id: str
    type: str = "user"


class Actor(msgspec.Struct, frozen=True):
    api_key: ApiKeyActor
    type: str = "api_key"


class EventProject(msgspec.Struct, frozen=True):
    id: str


class Details(msgspec.Struct, frozen=True):
    """What was changed; ``data`` of what was made, ``changes_requested`` of what was changed."""

    id: str
    data: dict[str, Any] | UnsetType = UNSET
    changes_requested: dict[str, Any] | UnsetType = UNSET


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change; the field that is named like its type has the details."""

    id: str
    type: str
    effective_at: int
    actor: Actor
    project: EventProject | UnsetType = UNSET
    project_created: Details | UnsetType = field(name="project.created", default=UNSET)
    project_updated: Details | UnsetType = field(name="project.updated", default=UNSET)
    project_archived: Details | UnsetType = field(name="project.archived", default=UNSET)
    api_key_created: Details | UnsetType = field(name="api_key.created", default=UNSET)
    api_key_updated: Details | UnsetType = field(name="api_key.updated", default=UNSET)
    api_key_deleted: Details | UnsetType = field(name="api_key.deleted", default=UNSET)
    service_account_created: Details | UnsetType = field(name="service_account.created", default=UNSET)
    service_account_updated: Details | UnsetType = field(name="service_account.updated", default=UNSET)
    service_account_deleted: Details | UnsetType = field(name="service_account.deleted", default=UNSET)
    rate_limit_updated: Details | UnsetType = field(name="rate_limit.updated", default=UNSET)
    organization_updated: Details | UnsetType = field(name="organization.updated", default=UNSET)


FIELDS = {each.encode_name: each.name for each in msgspec.structs.fields(Event)}


class EventQuery(ListQuery, frozen=True, kw_only=True):
    actor_ids: Ids | None = field(name="actor_ids[]", default=None)
    actor_emails: Ids | None = field(name="actor_emails[]", default=None)
    """Nobody here has one, so nothing is found."""
    event_types: Ids | None = field(name="event_types[]", default=None)
    project_ids: Annotated[tuple[Id, ...], Meta(max_length=100)] | None = field(name="project_ids[]", default=None)
    resource_ids: Ids | None = field(name="resource_ids[]", default=None)
    gt: Instant | None = field(name="effective_at[gt]", default=None)
    gte: Instant | None = field(name="effective_at[gte]", default=None)
    lt: Instant | None = field(name="effective_at[lt]", default=None)
    lte: Instant | None = field(name="effective_at[lte]", default=None)
    tenant_only: bool = False
    """Only what concerns no project."""


async def every(ask: Ask[EventQuery, Nothing]) -> Listing[Event]:
    """List what was changed, the newest first."""
    async with ask.reading() as connection:
        statement = _chosen(ask.query)
        return await listed(connection, ask.query, statement, store.audit_log.c.id, shaped, newest_first=True)


def _chosen(query: EventQuery) -> sa.Select[Any]:
    columns = store.audit_log.c
    statement = sa.select(store.audit_log)
    if query.actor_ids is not None:
        statement = statement.where(columns.actor_key_id.in_(query.actor_ids))
    if query.actor_emails is not None:
        statement = statement.where(sa.false())
    if query.resource_ids is not None:
        statement = statement.where(columns.object_id.in_(query.resource_ids))
    if query.event_types is not None:
        ours = {action for action, type_ in TYPES.items() if type_ in query.event_types}
        statement = statement.where(columns.action.in_(ours | (set(query.event_types) - set(TYPES))))
    if query.project_ids is not None:
        statement = statement.where(sa.or_(*(_is_of(project_id) for project_id in query.project_ids)))
    if query.tenant_only:
        statement = statement.where(columns.object_kind.in_(("organization", "admin_key", "policy")))
    for instant, compare in ((query.gt, gt), (query.gte, ge), (query.lt, lt), (query.lte, le)):
        if instant is not None:
            statement = statement.where(compare(columns.at, instant))
    return statement


def _is_of(project_id: str) -> sa.ColumnElement[bool]:
    """Whether it is about the project, or about something that says that it belongs to it."""
    columns = store.audit_log.c
    either = sa.func.coalesce(columns.after, columns.before, "")
    mentions = either.contains(f'"tenant_id":"{project_id}"', autoescape=True)
    return sa.or_(sa.and_(columns.object_kind == "tenant", columns.object_id == project_id), mentions)


def shaped(row: sa.Row[Any]) -> Event:
    type_ = TYPES.get(row.action, row.action)
    thing: dict[str, Any] = msgspec.json.decode(row.after or row.before or "{}")
    event = Event(id=row.id, type=type_, effective_at=row.at, actor=Actor(ApiKeyActor(row.actor_key_id)))
    changes: dict[str, Any] = {}
    project_id = row.object_id if row.object_kind == "tenant" else thing.get("tenant_id")
    if project_id is not None:
        changes["project"] = EventProject(project_id)
    if (name := FIELDS.get(type_)) is not None:
        told = _told(type_, thing)
        changes[name] = Details(
            row.object_id,
            data=told if type_.endswith(".created") else UNSET,
            changes_requested=told if type_.endswith(".updated") else UNSET,
        )
    return msgspec.structs.replace(event, **changes)


def _told(type_: str, thing: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's events say of a thing as it is afterwards."""
    match type_.partition(".")[0]:
        case "project":
            return {"name": thing.get("name"), "title": thing.get("name")}
        case "api_key":
            return {"scopes": (thing.get("scopes") or {}).get("endpoints") or []}
        case "service_account":
            return {"role": thing.get("role")}
        case "rate_limit":
            return {name: value for name, value in thing.items() if name.startswith("max_")}
        case _:
            return {"title": thing.get("name")}


ENDPOINTS = [OpenAIEndpoint("GET", ROOT + "/audit_logs", every, Listing[Event], OPERATORS, query=EventQuery)]
