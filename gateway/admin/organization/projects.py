"""Projects, as OpenAI calls tenants. A project that is archived is a tenant that is disabled."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.admin import tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Nothing
from gateway.admin.organization.shapes import ROOT, Listing, ListQuery, OpenAIEndpoint, listed, ours
from gateway.admin.problems import Conflict, Invalid
from gateway.admin.words import Title, Written

PATH = ROOT + "/projects"


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """One project; times in Unix seconds."""

    id: str
    name: str
    created_at: int
    archived_at: int | None
    status: str
    """ "active" or "archived"."""
    object: str = "organization.project"


class NewProject(Written, frozen=True, kw_only=True):
    """What a project is made of. What is null cannot be had here."""

    name: Title
    external_key_id: None = None
    geography: None = None
    residency: None = None


class ProjectChange(Written, frozen=True, kw_only=True):
    """What is to change."""

    name: Title | None = None
    external_key_id: None = None
    geography: None = None


class ProjectQuery(ListQuery, frozen=True, kw_only=True):
    include_archived: bool = False


async def every(ask: Ask[ProjectQuery, Nothing]) -> Listing[Project]:
    """List projects: of the organization that the header OpenAI-Organization names, or of all."""
    statement = sa.select(store.tenants)
    if not ask.query.include_archived:
        statement = statement.where(store.tenants.c.disabled_at.is_(None))
    if (organization_id := organization_of(ask)) is not None:
        statement = statement.where(store.tenants.c.organization_id == organization_id)
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, store.tenants.c.id, _of_row)


async def one(ask: Ask[Nothing, Nothing]) -> Project:
    """Read a project."""
    async with ask.reading() as connection:
        return shaped(await tenants.found(connection, ask.named("project_id")))


async def create(ask: Ask[Nothing, NewProject], change: Change) -> Project:
    """Make a project, whose policy is "default"."""
    new = tenants.NewTenant(name=ask.body.name, organization_id=organization_of(ask))
    return shaped(await tenants.create(ours(ask, new), change))


async def update(ask: Ask[Nothing, ProjectChange], change: Change) -> Project:
    """Rename a project."""
    project_id = ask.named("project_id")
    await active(change, project_id)
    renamed = tenants.TenantChange(name=msgspec.UNSET if ask.body.name is None else ask.body.name)
    return shaped(await tenants.update(ours(ask, renamed, tenant_id=project_id), change))


async def archive(ask: Ask[Nothing, Nothing], change: Change) -> Project:
    """Archive a project: none of its keys opens anything from then on."""
    disabled = tenants.TenantChange(disabled=True)
    return shaped(await tenants.update(ours(ask, disabled, tenant_id=ask.named("project_id")), change))


async def active(change: Change, project_id: str) -> tenants.Tenant:
    """A project that can be changed. Raises NotThere, and Conflict for one that is archived."""
    tenant = await tenants.found(change.connection, project_id)
    if tenant.disabled_at is not None:
        raise Conflict("The project is archived, so nothing of it can be changed.")
    return tenant


def organization_of(ask: Ask[Any, Any]) -> str | None:
    """What the client was told is its organization. Raises Invalid for what is no text: no store can look for it."""
    named: str | None = ask.request.headers.get("openai-organization")
    if named is not None and not named.isascii():
        raise Invalid.of([("OpenAI-Organization", "must be ASCII")])
    return named


def shaped(tenant: tenants.Tenant) -> Project:
    return Project(
        id=tenant.id,
        name=tenant.name,
        created_at=tenant.created_at,
        archived_at=tenant.disabled_at,
        status="active" if tenant.disabled_at is None else "archived",
    )


def _of_row(row: sa.Row[Any]) -> Project:
    return shaped(tenants.shaped(row))


ONE = PATH + "/{project_id}"
ENDPOINTS = [
    OpenAIEndpoint("GET", PATH, every, Listing[Project], READERS, query=ProjectQuery),
    OpenAIEndpoint("POST", PATH, create, Project, OPERATORS, body=NewProject, changes=True),
    OpenAIEndpoint("GET", ONE, one, Project, READERS),
    OpenAIEndpoint("POST", ONE, update, Project, OPERATORS, body=ProjectChange, changes=True),
    OpenAIEndpoint("POST", ONE + "/archive", archive, Project, OPERATORS, changes=True),
]
