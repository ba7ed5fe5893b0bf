"""Upstreams: servers elsewhere that answer for models, or relieve those that are served here.

Those of the settings are listed and not changed here. An API key that is given is kept sealed and never shown again;
a change without one keeps the one that is there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Invalid, NotThere
from gateway.errors import InUse
from gateway.sealing import sealed
from gateway.upstreams.known import Known
from gateway.upstreams.server import ServerView
from policies.upstreams.terms import MAX_UPSTREAMS, Kind, Upstream, fault_of

PATH = "/admin/v1/upstreams"

Secret = Annotated[str, Meta(min_length=1, max_length=8192, pattern=r"^[\x21-\x7e]+$(?!\n)")]


class Shown(Versioned, frozen=True, kw_only=True):
    """One upstream; times in Unix seconds. ``terms`` are as in the settings."""

    name: str
    terms: Upstream
    has_key: bool
    """An API key is sent to it; nothing says which."""
    origin: Literal["settings", "admin"]
    """Those of the settings are changed there."""
    created_at: int | None
    changed_at: int | None
    changed_by: str
    """A key's id; empty: the settings."""
    live: ServerView | None
    """As this gateway sees it; null where it does not ask it."""


class NewUpstream(Upstream, frozen=True, kw_only=True):
    """What to make: its terms, and its API key if it has one."""

    key: Secret | None = None


class ChangedUpstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is to be other than it is. ``key``: another one, or null for none."""

    model: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    upstream_model: str | UnsetType = UNSET
    key: Secret | UnsetType | None = UNSET
    kinds: tuple[Kind, ...] | UnsetType = UNSET
    cache_salt: bool | UnsetType = UNSET
    overflow: bool | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    choice: Literal["latency", "weight"] | UnsetType = UNSET
    fallbacks: tuple[str, ...] | UnsetType = UNSET
    max_concurrent: int | UnsetType = UNSET
    max_model_tokens: int | UnsetType = UNSET
    tokenizer: str | UnsetType = UNSET
    connect_timeout_s: float | UnsetType = UNSET
    first_byte_timeout_s: float | UnsetType = UNSET
    idle_timeout_s: float | UnsetType = UNSET
    timeout_s: float | UnsetType = UNSET
    max_answer_bytes: int | UnsetType = UNSET
    max_retries: int | UnsetType = UNSET
    retry_share: float | UnsetType = UNSET
    hedge: bool | UnsetType = UNSET
    breaker_failures: int | UnsetType = UNSET
    breaker_open_s: float | UnsetType = UNSET
    probe_s: float | UnsetType = UNSET


assert {*ChangedUpstream.__struct_fields__, "name", "key_variable"} == {*NewUpstream.__struct_fields__}


class UpstreamQuery(PageQuery, frozen=True, kw_only=True):
    """Which of them."""

    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


async def every(ask: Ask[UpstreamQuery, Nothing]) -> Page[Shown]:
    """List upstreams, those of the settings behind the last of the others."""
    columns, model = store.upstreams.c, ask.query.model
    statement = sa.select(store.upstreams).where(columns.deleted_at.is_(None))
    if model is not None:
        # As msgspec writes it, whose order of fields does not change.
        statement = statement.where(columns.document.contains(f'"model":{_json(model)}', autoescape=True))
    async with ask.reading() as connection:
        page = await listed(connection, ask.query, statement, columns.name, lambda row: shaped(ask, row))
    if page.has_more:
        return page
    settled = [
        _settled(ask, known)
        for known in ask.gw.upstreams.known()
        if known.origin == "settings" and model in (None, known.terms.model)
    ]
    return Page([*page.data, *settled], False, None)


async def one(ask: Ask[Nothing, Nothing]) -> Shown:
    """Read one upstream."""
    name = ask.named("name")
    for known in ask.gw.upstreams.known():
        if known.terms.name == name and known.origin == "settings":
            return _settled(ask, known)
    async with ask.reading() as connection:
        return shaped(ask, await _row(connection, name))


async def create(ask: Ask[Nothing, NewUpstream], change: Change) -> Shown:
    """Ask an upstream from now on."""
    body = ask.body
    terms = Upstream(**{name: getattr(body, name) for name in Upstream.__struct_fields__})
    _check(ask, terms)
    columns = store.upstreams.c
    if ask.gw.upstreams.settled(terms.name):
        raise Conflict(f"The settings have an upstream {terms.name}.")
    row = (await change.connection.execute(sa.select(store.upstreams).where(columns.name == terms.name))).first()
    if row is not None and row.deleted_at is None:
        raise Conflict(f"There is an upstream {terms.name} already.")
    there = sa.select(sa.func.count()).select_from(store.upstreams)
    if (await change.connection.execute(there)).scalar_one() >= MAX_UPSTREAMS and row is None:
        raise Conflict(f"There are {MAX_UPSTREAMS} names of upstreams, which is as many as there can be.")
    values = _values(ask, change, terms, body.key) | {
        "created_at": change.at,
        "deleted_at": None,
        "version": 1 if row is None else row.version + 1,
    }
    if row is None:
        await change.connection.execute(sa.insert(store.upstreams), {"name": terms.name, **values})
    else:
        await change.connection.execute(sa.update(store.upstreams).where(columns.name == terms.name).values(values))
    after = shaped(ask, await _row(change.connection, terms.name))
    await change.record("upstream.created", "upstream", terms.name, None, _noted(after))
    return after


async def update(ask: Ask[Nothing, ChangedUpstream], change: Change) -> Shown:
    """Change an upstream; requests under way go on as they began."""
    name = _own(ask)
    row = await _row(change.connection, name)
    before = shaped(ask, row)
    ask.check_version(before.version)
    given = {field: value for field, value in msgspec.structs.asdict(ask.body).items() if value is not UNSET}
    key = given.pop("key", UNSET)
    try:
        terms = msgspec.convert({**msgspec.to_builtins(before.terms), **msgspec.to_builtins(given)}, Upstream)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise Invalid.of([(where.rstrip("`") or "body", what)]) from None
    _check(ask, terms)
    if key is UNSET and row.sealed_key is not None and _origin_of(terms.url) != _origin_of(before.terms.url):
        raise Invalid.of([("key", "was given for another server: give it again, or null")])
    values = _values(ask, change, terms, key if isinstance(key, str) else None) | {"version": before.version + 1}
    if key is UNSET:
        del values["sealed_key"]
    await change.connection.execute(sa.update(store.upstreams).where(store.upstreams.c.name == name).values(values))
    after = shaped(ask, await _row(change.connection, name))
    await change.record("upstream.updated", "upstream", name, _noted(before), _noted(after))
    return after


async def delete(ask: Ask[Nothing, Nothing], change: Change) -> Shown:
    """Ask an upstream no more; requests under way go on to their end, and its key is forgotten."""
    name = _own(ask)
    before = shaped(ask, await _row(change.connection, name))
    ask.check_version(before.version)
    await change.connection.execute(
        sa.update(store.upstreams)
        .where(store.upstreams.c.name == name)
        .values(
            deleted_at=change.at,
            sealed_key=None,
            changed_at=change.at,
            changed_by=ask.caller.key_id,
            version=before.version + 1,
            revision=change.revision,
        )
    )
    await change.record("upstream.deleted", "upstream", name, _noted(before), None)
    return msgspec.structs.replace(before, version=before.version + 1, has_key=False, live=None)


def shaped(ask: Ask[Any, Any], row: sa.Row[Any]) -> Shown:
    terms = msgspec.json.decode(row.document, type=Upstream)
    return Shown(
        name=row.name,
        terms=terms,
        has_key=row.sealed_key is not None,
        origin="admin",
        created_at=row.created_at,
        changed_at=row.changed_at,
        changed_by=row.changed_by,
        live=ask.gw.upstreams.view(row.name),
        version=row.version,
    )


def _settled(ask: Ask[Any, Any], known: Known) -> Shown:
    return Shown(
        name=known.terms.name,
        terms=known.terms,
        has_key=bool(known.key.value),
        origin="settings",
        created_at=None,
        changed_at=None,
        changed_by="",
        live=ask.gw.upstreams.view(known.terms.name),
        version=0,
    )


def _noted(shown: Shown) -> Shown:
    """For the audit log, where the moment is of no use."""
    return msgspec.structs.replace(shown, live=None)


def _own(ask: Ask[Any, Any]) -> str:
    """Raises InUse for one of the settings."""
    name = ask.named("name")
    if ask.gw.upstreams.settled(name):
        raise InUse(f"The upstream {name} is one of the settings, and is changed there.")
    return name


def _check(ask: Ask[Any, Any], terms: Upstream) -> None:
    """Raises Invalid."""
    faults = list(fault_of(terms, ask.gw.settings.models))
    if terms.key_variable:  # else whoever may make upstreams could have any variable sent anywhere
        faults.append(("key_variable", "only the settings name variables of the environment; give the key"))
    if faults:
        raise Invalid.of(faults)


def _values(ask: Ask[Any, Any], change: Change, terms: Upstream, key: str | None) -> dict[str, Any]:
    return {
        "document": msgspec.json.encode(terms).decode(),
        "sealed_key": None if key is None else sealed(ask.gw.directory.secret, "upstream", terms.name, key),
        "changed_at": change.at,
        "changed_by": ask.caller.key_id,
        "revision": change.revision,
    }


async def _row(connection: Any, name: str) -> sa.Row[Any]:
    """Raises NotThere."""
    columns = store.upstreams.c
    query = sa.select(store.upstreams).where(columns.name == name, columns.deleted_at.is_(None))
    row: sa.Row[Any] | None = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no upstream {name}.")
    return row


def _origin_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Shown], READERS, query=UpstreamQuery),
    Endpoint("POST", PATH, create, Shown, OPERATORS, body=NewUpstream, status=201, changes=True),
    Endpoint("GET", _ONE, one, Shown, READERS),
    Endpoint("PATCH", _ONE, update, Shown, OPERATORS, body=ChangedUpstream, changes=True, needs_match=True),
    Endpoint("DELETE", _ONE, delete, Shown, OPERATORS, changes=True),
]
