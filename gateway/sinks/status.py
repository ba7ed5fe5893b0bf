"""How far each sink is, by what the store says: the same whichever gateway is asked, and whichever delivers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.follow import NO_CHAIN
from gateway.sinks.book import MAX_FAILURES, count_failures, skips, states
from gateway.sinks.config import SinkInvalid, url_of
from gateway.sinks.delivery import follower_of
from policies.sinks import Kind, Measure, Sink

MAX_POSITIONS = 20
MAX_SKIPPED = 100
"""Tenants that are named."""


class Position(msgspec.Struct, frozen=True):
    """Where a sink stands in one chain of the ledger."""

    chain: int
    position: int
    """Of the last row that is done with."""
    last_position: int
    """Of the last row that there is."""


class Skipped(msgspec.Struct, frozen=True):
    """A tenant whose rows were passed over, since nothing says who it is to the receiver."""

    tenant_id: str
    num_rows: int
    first_at: int
    last_at: int
    """Unix seconds, of the rows."""


class SinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A sink as it stands. Times are Unix seconds."""

    name: str
    kind: Kind
    receiver: str
    """The host that events are posted to, without the rest of its address."""
    customer: str
    meters: dict[Measure, str]
    state: Literal["current", "behind", "waiting", "full"]
    """waiting: the receiver takes nothing, see last_error; full: it has refused so many events that no more are
    sent."""
    num_rows_behind: int
    num_seconds_behind: int
    """Since the first of these rows was settled."""
    num_gaps: int
    """Chains in which it waits for a row that has not come, as from a spool; ``penstock ledger verify`` names it."""
    num_rows: int
    """Done with."""
    num_events: int
    """Taken by the receiver."""
    num_failures: int
    """Refused by it, and kept."""
    delivered_at: int | None
    num_tries: int
    """That failed since something was taken."""
    retry_at: int | None
    last_error: str | None
    last_error_at: int | None
    num_rows_skipped: int
    skipped: list[Skipped]
    positions: list[Position]
    """Of the latest chains."""


class Lag(NamedTuple):
    num_rows: int
    oldest_at: int | None
    """When the first row that is left was settled."""
    num_gaps: int
    positions: list[Position]


async def status_of(connection: AsyncConnection, name: str, sink: Sink, now: float) -> SinkStatus:
    """Raises what the database raises."""
    row = (await connection.execute(sa.select(states).where(states.c.sink == name))).first()
    num_failures = await count_failures(connection, name)
    lag = await _lag(connection, name)
    num_skipped, skipped = await _skipped(connection, name)
    num_tries = row.num_tries if row is not None else 0
    state: Literal["current", "behind", "waiting", "full"] = "behind" if lag.num_rows else "current"
    if num_tries:
        state = "waiting"
    elif num_failures >= MAX_FAILURES:
        state = "full"
    try:
        receiver = str(url_of(name, sink).origin())
    except SinkInvalid:  # no gateway starts with such a one
        receiver = ""
    return SinkStatus(
        name=name,
        kind=sink.kind,
        receiver=receiver,
        customer=sink.customer,
        meters=sink.meters,
        state=state,
        num_rows_behind=lag.num_rows,
        num_seconds_behind=max(0, int(now) - lag.oldest_at) if lag.oldest_at is not None else 0,
        num_gaps=lag.num_gaps,
        num_rows=row.num_rows if row is not None else 0,
        num_events=row.num_events if row is not None else 0,
        num_failures=num_failures,
        delivered_at=row.delivered_at if row is not None else None,
        num_tries=num_tries,
        retry_at=int(row.retry_at) if row is not None and row.retry_at else None,
        last_error=row.last_error if row is not None else None,
        last_error_at=row.last_error_at if row is not None else None,
        num_rows_skipped=num_skipped,
        skipped=skipped,
        positions=lag.positions,
    )


async def _skipped(connection: AsyncConnection, name: str) -> tuple[int, list[Skipped]]:
    columns = skips.c
    total = sa.select(sa.func.coalesce(sa.func.sum(columns.num_rows), 0)).where(columns.sink == name)
    latest = (
        sa.select(columns.tenant_id, columns.num_rows, columns.first_at, columns.last_at)
        .where(columns.sink == name)
        .order_by(columns.last_at.desc(), columns.tenant_id)
        .limit(MAX_SKIPPED)
    )
    rows = [Skipped(*row) for row in await connection.execute(latest)]
    return int((await connection.execute(total)).scalar_one()), rows


async def _lag(connection: AsyncConnection, name: str) -> Lag:
    found: list[Position] = []
    oldest: list[int] = []
    num_rows = num_gaps = 0
    for row in await connection.execute(_places(name)):
        if row.last is None:
            continue
        found.append(Position(row.id, row.position, max(row.last, row.position)))
        if row.last > row.position:
            num_rows += row.last - row.position
            oldest.append(row.settled_at)
            num_gaps += row.next > row.position + 1 and not row.is_repeat
    return Lag(num_rows, min(oldest, default=None), num_gaps, found[-MAX_POSITIONS:])


def _places(name: str) -> sa.Select[Any]:
    """(chain, the cursor's position, the last row's, the next row's and when that was settled, whether a repeat stands
    before it), each found by one look into the index."""
    chains = sa.union_all(sa.select(store.ledger_chains.c.id), sa.select(sa.literal(NO_CHAIN))).subquery("chains")
    cursors, rows = store.ledger_cursors.c, store.ledger.c
    position = sa.func.coalesce(cursors.position, 0)
    ours = sa.select(rows.position).where(rows.chain == chains.c.id)
    last = ours.order_by(rows.position.desc()).limit(1).scalar_subquery()

    def behind(column: sa.Column[Any]) -> Any:
        found = sa.select(column).where(rows.chain == chains.c.id, rows.position > position)
        return found.order_by(rows.position).limit(1).scalar_subquery()

    places = store.ledger_repeats.c
    repeat = sa.exists().where(places.chain == chains.c.id, places.position == position + 1)
    joined = chains.outerjoin(
        store.ledger_cursors, (cursors.follower == follower_of(name)) & (cursors.chain == chains.c.id)
    )
    columns = (chains.c.id, position.label("position"), last.label("last"), repeat.label("is_repeat"))
    return (
        sa.select(*columns, behind(rows.settled_at).label("settled_at"), behind(rows.position).label("next"))
        .select_from(joined)
        .order_by(chains.c.id)
    )
