"""The sinks: how far each is, what was refused, and having that tried again or given up."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import NotThere
from gateway.admin.words import Written
from gateway.sinks.status import SinkStatus, status_of
from policies.sinks import Sink

PATH = "/admin/v1/sinks"
EventId = Annotated[str, Meta(max_length=100, pattern=r"^[!-~]+$(?!\n)")]

failures, states = store.sink_failures, store.sink_states


class SinkFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the receiver has refused for good."""

    event_id: str
    request_id: str
    tenant_id: str
    error: str
    num_tries: int
    failed_at: int
    """Unix seconds."""
    is_due: bool
    """Another try is asked for, and has not been made yet."""


class Which(Written, frozen=True):
    """Refused events of one sink."""

    event_ids: Annotated[list[EventId], Meta(min_length=1, max_length=1000)] | None = None
    """Null: all of them."""


class Chosen(msgspec.Struct, frozen=True):
    """How many they were."""

    num_events: int


async def every(ask: Ask[Nothing, Nothing]) -> Page[SinkStatus]:
    """List the sinks and how far each is, all on one page."""
    async with ask.reading() as connection:
        found = [await status_of(connection, name, sink, time.time()) for name, sink in ask.gw.settings.sinks.items()]
    return Page(found, False, None)


async def one(ask: Ask[Nothing, Nothing]) -> SinkStatus:
    """Read how far a sink is."""
    name, sink = _found(ask)
    async with ask.reading() as connection:
        return await status_of(connection, name, sink, time.time())


async def refused(ask: Ask[PageQuery, Nothing]) -> Page[SinkFailure]:
    """List the events that a sink's receiver has refused"""
    name, _ = _found(ask)
    async with ask.reading() as connection:
        query = sa.select(failures).where(failures.c.sink == name)
        return await listed(connection, ask.query, query, failures.c.event_id, shaped)


async def retry(ask: Ask[Nothing, Which], change: Change) -> Chosen:
    """Have events that were refused tried again, and whatever waits for another try at once."""
    name, _ = _found(ask)
    due = sa.update(failures).where(_is_chosen(name, ask.body)).values(is_due=True)
    chosen = Chosen((await change.connection.execute(due)).rowcount)
    await change.connection.execute(sa.update(states).where(states.c.sink == name).values(retry_at=0.0))
    await change.record("sink.retried", "sink", name, None, chosen)
    return chosen


async def discard(ask: Ask[Nothing, Which], change: Change) -> Chosen:
    """Give up events that were refused"""
    name, _ = _found(ask)
    gone = sa.delete(failures).where(_is_chosen(name, ask.body))
    chosen = Chosen((await change.connection.execute(gone)).rowcount)
    await change.record("sink.discarded", "sink", name, None, chosen)
    return chosen


def shaped(row: sa.Row[Any]) -> SinkFailure:
    return SinkFailure(**{name: getattr(row, name) for name in SinkFailure.__struct_fields__})


def _is_chosen(name: str, which: Which) -> sa.ColumnElement[bool]:
    ours = failures.c.sink == name
    return ours if which.event_ids is None else ours & failures.c.event_id.in_(which.event_ids)


def _found(ask: Ask[Any, Any]) -> tuple[str, Sink]:
    """Raises NotThere."""
    name = ask.named("name")
    sink = ask.gw.settings.sinks.get(name)
    if sink is None:
        raise NotThere(f"The settings have no sink {name}.")
    return name, sink


_ONE = PATH + "/{name}"
ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[SinkStatus], READERS),
    Endpoint("GET", _ONE, one, SinkStatus, READERS),
    Endpoint("GET", _ONE + "/failures", refused, Page[SinkFailure], READERS, query=PageQuery),
    Endpoint("POST", _ONE + "/retry", retry, Chosen, OPERATORS, body=Which, changes=True),
    Endpoint("POST", _ONE + "/discard", discard, Chosen, OPERATORS, body=Which, changes=True),
]
