"""One sink's delivery, a receiver of its own, and the rows that it is told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.clock import Clock
from gateway.ledger import Entry
from gateway.sinks.config import kind_of, secrets_of, url_of
from gateway.sinks.delivery import Delivery
from gateway.sinks.events import events_of
from gateway.sinks.sending import Sender
from gateway.sinks.status import SinkStatus, status_of
from gateway.store import Store
from policies import settings
from policies.sinks import Sink
from tests.builders import PATIENCE_S, an_entry, write_chain
from tests.gateway.receivers import KEY, SECRET, receiving

NOW = 1_795_000_500
METERS = {"prompt": "input", "cached_prompt": "cached", "completion": "output", "cost_micros": "spend"}


class Wall:
    """The time of day, moved by hand."""

    def __init__(self) -> None:
        self.at = float(NOW)

    def __call__(self) -> float:
        return self.at


class Bench:
    """One sink's delivery and its receiver; ``restart`` as a gateway does."""

    def __init__(self, rooms: Store, session: aiohttp.ClientSession, kind: str, receiver: Any, **others: Any) -> None:
        self.rooms = rooms
        self.session = session
        self.receiver: Any = receiver
        self.wall = Wall()
        receiver.now = self.wall
        self.sink = a_sink(kind, url=f"{receiver.url}?token=hidden", **others)
        self.delivery = self.restart()
        self._next: dict[int, int] = {}

    def restart(self) -> Delivery:
        kind, key = kind_of("one", self.sink, {"KEY": SECRET if self.sink.kind == "webhook" else KEY}, "USD")
        url = url_of("one", self.sink)
        secrets = secrets_of(key, url, self.sink)
        sender = Sender(kind, url, self.session, secrets, self.sink.timeout_s, self.wall)
        self.delivery = Delivery("one", self.sink, sender, self.rooms, Clock(), self.wall)
        return self.delivery

    async def write(self, *entries: Entry, chain: int = 1) -> list[Entry]:
        first = self._next.get(chain, 1)
        self._next[chain] = first + len(entries)
        return await write_chain(self.rooms, *entries, chain=chain, first_position=first)

    async def status(self) -> SinkStatus:
        async with self.rooms.engine.connect() as connection:
            return await status_of(connection, "one", self.sink, self.wall())

    async def failures(self) -> dict[str, str]:
        async with self.rooms.engine.connect() as connection:
            rows = await connection.execute(sa.select(store.sink_failures))
            return {row.event_id: row.error for row in rows}

    async def ask_again(self) -> None:
        """As the administration does."""
        async with self.rooms.engine.begin() as connection:
            await connection.execute(sa.update(store.sink_failures).values(is_due=True))
            await connection.execute(sa.update(store.sink_states).values(retry_at=0.0))

    def expected(self, *entries: Entry) -> dict[str, Any]:
        """What the receiver has to have been told in the end."""
        return {event.id: event.value for entry in entries for event in events_of(entry, entry.tenant_id, self.sink)}

    def values(self) -> dict[str, Any]:
        if self.sink.kind == "webhook":
            return dict.fromkeys(self.receiver.counted, 0)
        return {event_id: value for event_id, (_, _, value) in self.receiver.counted.items()}


def a_sink(kind: str, **others: Any) -> Sink:
    meters = {} if kind == "webhook" else METERS
    return Sink(**{"kind": kind, "key_variable": "KEY", "meters": meters, "timeout_s": PATIENCE_S, **others})


async def add_tenants(connection: Any) -> None:
    """ten_1 to ten_4, of which ten_4 is nobody to Stripe."""
    await connection.execute(
        sa.insert(store.organizations).values(id="org_1", name="one", created_at=1, version=1, revision=1)
    )
    await connection.execute(sa.insert(store.policy_heads).values(name="p", current_version=0, revision=1))
    for number in range(1, 5):
        row = {"id": f"ten_{number}", "organization_id": "org_1", "name": f"name {number}", "policy": "p"}
        row |= {"created_at": 1, "version": 1, "revision": 1}
        metadata = {"stripe_customer_id": f"cus_{number}"} if number < 4 else {}
        await connection.execute(
            sa.insert(store.tenants).values(**row, metadata=msgspec.json.encode(metadata).decode())
        )


@contextlib.asynccontextmanager
async def opened(store_settings: settings.Store) -> AsyncIterator[Store]:
    """The store, with tenants in it."""
    async with store.opened(store_settings) as rooms:
        async with rooms.engine.begin() as connection:
            await add_tenants(connection)
        yield rooms


@contextlib.asynccontextmanager
async def benches(rooms: Store) -> AsyncIterator[Any]:
    """``await open_bench(kind)``: a sink of that kind, and its receiver."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def open_it(kind: str, **others: Any) -> Bench:
            return Bench(rooms, session, kind, await stack.enter_async_context(receiving(kind)), **others)

        yield open_it


def some_entries(number: int, chance: random.Random | None = None) -> list[Entry]:
    chance = chance or random.Random(number)
    return [
        an_entry(
            tenant_id=f"ten_{chance.randrange(1, 4)}",
            num_prompt_tokens=chance.randrange(10, 500),
            num_cached_tokens=chance.randrange(10),
            num_completion_tokens=chance.randrange(3),
            cost_micros=chance.randrange(1000),
            settled_at=NOW - 60,
            cache=chance.choice(["miss", "hit"]),
        )
        for _ in range(number)
    ]
