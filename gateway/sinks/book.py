"""What the store keeps of a sink: how delivery stands, which events were refused, and whose rows were passed over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.entry import Entry
from gateway.sinks.events import Event
from gateway.store import Store
from gateway.store.upserts import insert_for
from policies.sinks import BY_METADATA, Sink

MAX_FAILURES = 10_000
"""Events refused by one receiver; with so many something is wrong with all of them, and no more are sent."""

states, failures, skips = store.sink_states, store.sink_failures, store.sink_skips


class State(NamedTuple):
    """How delivery stands."""

    num_tries: int
    """That failed, one behind the other, until now."""
    retry_at: float
    """Unix seconds; nothing is sent before."""
    last_error: str | None
    num_failures: int


class Skips(msgspec.Struct):
    """Rows of one tenant that were passed over; times are the rows', in Unix seconds."""

    num_rows: int
    first_at: int
    last_at: int


class Failure(NamedTuple):
    """An event that the receiver has refused, of which another try is asked for."""

    event_id: str
    request_id: str


class Book:
    """One sink's."""

    def __init__(self, rooms: Store, name: str, sink: Sink) -> None:
        self._rooms = rooms
        self._name = name
        self._sink = sink

    async def state(self) -> State:
        """Raises what the database raises, as do all of these."""
        async with self._rooms.engine.connect() as connection:
            columns = states.c
            query = sa.select(columns.num_tries, columns.retry_at, columns.last_error)
            row = (await connection.execute(query.where(columns.sink == self._name))).first()
            num_failures = await count_failures(connection, self._name)
        return State(*row, num_failures) if row is not None else State(0, 0.0, None, num_failures)

    async def customers(self, tenant_ids: Collection[str]) -> dict[str, str]:
        """Who they are to the receiver, as far as that is known."""
        columns = store.tenants.c
        query = sa.select(columns.id, columns.name, columns.metadata).where(columns.id.in_(tenant_ids))
        wanted, found = self._sink.customer, {}
        async with self._rooms.engine.connect() as connection:
            for tenant_id, name, metadata in await connection.execute(query):
                if wanted.startswith(BY_METADATA):
                    known = msgspec.json.decode(metadata, type=dict[str, str])
                    customer = known.get(wanted.removeprefix(BY_METADATA), "")
                else:
                    customer = name if wanted == "tenant_name" else tenant_id
                if customer.strip():
                    found[tenant_id] = customer.strip()
        return found

    async def add(
        self,
        connection: AsyncConnection,
        *,
        num_rows: int,
        num_events: int,
        refused: Iterable[tuple[Event, str]],
        skipped: Mapping[str, Skips],
        now: float,
    ) -> None:
        """Rows that are done with, in the transaction that moves the cursor past them. ``num_events``: those that the
        receiver has taken."""
        grown: dict[str, Any] = {
            "num_rows": states.c.num_rows + num_rows,
            "num_events": states.c.num_events + num_events,
            "num_tries": 0,
            "retry_at": 0.0,
        }
        row = self._state(num_rows=num_rows, num_events=num_events)
        if num_events:
            row["delivered_at"] = grown["delivered_at"] = int(now)
        await self._write(connection, row, grown)
        for tenant_id, seen in skipped.items():
            insert = insert_for(connection.dialect.name)(skips)
            values = {"sink": self._name, "tenant_id": tenant_id, **msgspec.structs.asdict(seen)}
            more = {"num_rows": skips.c.num_rows + insert.excluded.num_rows, "last_at": insert.excluded.last_at}
            statement = insert.on_conflict_do_update(index_elements=[skips.c.sink, skips.c.tenant_id], set_=more)
            await connection.execute(statement, values)
        rows = [
            {
                "sink": self._name,
                "event_id": event.id,
                "request_id": event.entry.request_id,
                "tenant_id": event.entry.tenant_id,
                "error": why,
                "num_tries": 1,
                "failed_at": int(now),
                "is_due": False,
            }
            for event, why in refused
        ]
        if rows:
            await connection.execute(insert_for(connection.dialect.name)(failures).on_conflict_do_nothing(), rows)

    async def note(self, why: str, num_tries: int, retry_at: float, now: float) -> None:
        """Nothing is taken at the moment."""
        values = {"num_tries": num_tries, "retry_at": retry_at, "last_error": why, "last_error_at": int(now)}
        async with self._rooms.engine.begin() as connection:
            await self._write(connection, self._state(**values), values)

    async def due(self, limit: int) -> Sequence[Failure]:
        """Refused events that are to be tried again."""
        columns = failures.c
        query = (
            sa.select(columns.event_id, columns.request_id)
            .where(columns.sink == self._name, columns.is_due)
            .order_by(columns.event_id)
            .limit(limit)
        )
        async with self._rooms.engine.connect() as connection:
            return [Failure(*row) for row in await connection.execute(query)]

    async def entries(self, request_ids: Collection[str]) -> dict[str, Entry]:
        """The rows of the ledger, by their requests."""
        query = sa.select(store.ledger).where(store.ledger.c.request_id.in_(request_ids))
        async with self._rooms.engine.connect() as connection:
            return {row.request_id: Entry(*row) for row in await connection.execute(query)}

    async def tried(self, done: Mapping[str, str | None], now: float) -> None:
        """What became of events that had been refused before: those without a reason are refused no more."""
        taken = [event_id for event_id, why in done.items() if why is None]
        async with self._rooms.engine.begin() as connection:
            row = self._state(num_events=len(taken))
            grown: dict[str, Any] = {"num_events": states.c.num_events + len(taken)}
            await self._write(connection, row, grown)
            columns = failures.c
            await connection.execute(sa.delete(failures).where(columns.sink == self._name, columns.event_id.in_(taken)))
            again = [{"refused": event_id, "why": why} for event_id, why in done.items() if why is not None]
            if again:
                refused = (
                    sa.update(failures)
                    .where(columns.sink == self._name, columns.event_id == sa.bindparam("refused"))
                    .values(
                        error=sa.bindparam("why"),
                        num_tries=columns.num_tries + 1,
                        failed_at=int(now),
                        is_due=False,
                    )
                )
                await connection.execute(refused, again)

    def _state(self, **others: Any) -> dict[str, Any]:
        return {"sink": self._name, "num_rows": 0, "num_events": 0, "num_tries": 0, "retry_at": 0.0, **others}

    async def _write(self, connection: AsyncConnection, row: dict[str, Any], changed: dict[str, Any]) -> None:
        insert = insert_for(connection.dialect.name)(states).values(row)
        await connection.execute(insert.on_conflict_do_update(index_elements=[states.c.sink], set_=changed))


async def count_failures(connection: AsyncConnection, name: str) -> int:
    query = sa.select(sa.func.count()).select_from(failures).where(failures.c.sink == name)
    number: int = (await connection.execute(query)).scalar_one()
    return number
