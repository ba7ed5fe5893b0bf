"""Adapters: small changes of a served model, each a ``model`` of its own to clients.

One is loaded when every ready worker of its model has read it, and refused by the reason that a worker gives; a worker
that comes later loads it before it is sent a request, and a model that is not loaded is loaded for it. Requests under
way keep the version that they began with.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import adapters, store
from gateway.adapters import AdapterRefused, NobodyThere
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing, Versioned
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Invalid, NotThere
from gateway.admin.words import Written
from gateway.errors import ModelUnavailable

PATH = "/admin/v1/adapters"
LOAD_S = 60.0
"""How long the workers may take to read one."""
MAX_ADAPTERS = 10_000
"""Which every gateway has in memory."""
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$(?!\n)")]
Word = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00]+$(?!\n\x00)")]


class Adapter(Versioned, frozen=True, kw_only=True):
    """One adapter; times in Unix seconds, ``loaded_by`` a key's id or "settings"."""

    name: str
    """The ``model`` that clients ask for."""
    model: str
    """The one that it changes."""
    adapter_id: str
    """Of these weights: another one whenever they are loaded anew."""
    source: str
    """A directory in PEFT's layout, where the workers run."""
    digest: str
    """Of its files; empty: no worker has read them yet."""
    rank: int
    num_bytes: int
    """In a worker's memory."""
    loaded_at: int
    loaded_by: str
    unloaded_at: int | None
    """Null while it is served."""


class NewAdapter(Written, frozen=True, kw_only=True):
    """What to load, and under which name; a name that is served already gets the new weights for requests to come."""

    name: Name
    model: Word
    source: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$(?!\n)")]


class AdapterQuery(PageQuery, frozen=True, kw_only=True):
    """Which of them."""

    model: Word | None = None


async def every(ask: Ask[AdapterQuery, Nothing]) -> Page[Adapter]:
    """List the adapters that are served, or were."""
    statement = sa.select(store.adapters)
    if ask.query.model is not None:
        statement = statement.where(store.adapters.c.model == ask.query.model)
    async with ask.reading() as connection:
        return await listed(connection, ask.query, statement, store.adapters.c.name, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> Adapter:
    """Read one adapter."""
    async with ask.reading() as connection:
        row = await _row(connection, ask.named("name"))
    if row is None:
        raise NotThere(f"There is no adapter {ask.named('name')}.")
    return shaped(row)


@contextlib.asynccontextmanager
async def tried(ask: Ask[Nothing, NewAdapter]) -> AsyncIterator[Adapter]:
    """The workers have read it, and keep it if it is served afterwards. Raises Invalid, and what stands in the way of
    loading its model."""
    body, dispatch = ask.body, ask.gw.dispatch
    if body.model not in ask.gw.settings.models:
        raise Invalid.of([("model", f"there is no model {body.model} that adapters could change")])
    if body.name in ask.gw.settings.models:
        raise Invalid.of([("name", f"{body.name} is a model itself")])
    wanted = adapters.Adapter(body.name, body.model, adapters.new_adapter_id(body.name), body.source, "", 0)
    try:
        loaded = await dispatch.try_adapter(wanted)
        yield Adapter(
            name=body.name,
            model=body.model,
            adapter_id=wanted.adapter_id,
            source=body.source,
            digest=loaded.digest,
            rank=loaded.rank,
            num_bytes=loaded.num_bytes,
            loaded_at=0,
            loaded_by=ask.caller.key_id,
            unloaded_at=None,
            version=1,
        )
    except AdapterRefused as refused:
        raise Invalid.of([("source", str(refused))]) from None
    except NobodyThere:
        raise ModelUnavailable(
            f"No worker of the model '{body.model}' is ready to read the adapter. Please try again.", retry_after_s=1.0
        ) from None
    finally:
        dispatch.end_trial(wanted)


async def load(ask: Ask[Nothing, NewAdapter], change: Change, read: Adapter) -> Adapter:
    """Serve an adapter, or another version of it, without a pause."""
    row = await _row(change.connection, read.name)
    if row is not None and row.model != read.model:
        raise Conflict(f"The name {read.name} is that of an adapter of the model {row.model}, and stays with it.")
    if row is None:
        count = (await change.connection.execute(sa.select(sa.func.count()).select_from(store.adapters))).scalar_one()
        if count >= MAX_ADAPTERS:
            raise Conflict(f"There are {MAX_ADAPTERS} names of adapters, which is as many as there can be.")
    version = 1 if row is None else row.version + 1
    after = msgspec.structs.replace(read, loaded_at=change.at, version=version)
    values = msgspec.structs.asdict(after) | {"revision": change.revision}
    if row is None:
        await change.connection.execute(sa.insert(store.adapters), values)
    else:
        await change.connection.execute(
            sa.update(store.adapters).where(store.adapters.c.name == read.name).values(values)
        )
    before = None if row is None else shaped(row)
    await change.record("adapter.loaded", "adapter", read.name, before, after)
    return after


async def unload(ask: Ask[Nothing, Nothing], change: Change) -> Adapter:
    """Serve an adapter no more; requests under way go on to their end."""
    name = ask.named("name")
    row = await _row(change.connection, name)
    if row is None or row.unloaded_at is not None:
        raise NotThere(f"No adapter {name} is served.")
    before = shaped(row)
    ask.check_version(before.version)
    after = msgspec.structs.replace(before, unloaded_at=change.at, version=before.version + 1)
    await change.connection.execute(
        sa.update(store.adapters)
        .where(store.adapters.c.name == name)
        .values(unloaded_at=after.unloaded_at, version=after.version, revision=change.revision)
    )
    await change.record("adapter.unloaded", "adapter", name, before, after)
    return after


def shaped(row: sa.Row[Any]) -> Adapter:
    values = dict(row._mapping)
    del values["revision"]
    return Adapter(**values)


async def _row(connection: Any, name: str) -> sa.Row[Any] | None:
    found = await connection.execute(sa.select(store.adapters).where(store.adapters.c.name == name))
    row: sa.Row[Any] | None = found.first()
    return row


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[Adapter], READERS, query=AdapterQuery),
    Endpoint(
        "POST",
        PATH,
        load,
        Adapter,
        OPERATORS,
        body=NewAdapter,
        status=201,
        changes=True,
        around=tried,
        limit_s=LOAD_S,
    ),
    Endpoint("GET", _ONE, one, Adapter, READERS),
    Endpoint("DELETE", _ONE, unload, Adapter, OPERATORS, changes=True),
]
