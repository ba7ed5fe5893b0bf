"""Which rows belong to a period, and reading them in an order that does not change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.exports import DAY_S, Order
from gateway.ledger.entry import Entry
from gateway.ledger.follow import NO_CHAIN
from gateway.store import Store

PAGE_ROWS = 1024


class Span(NamedTuple):
    """Rows of one chain that belong to one day, by positions, both ends included; those of no chain are in the order of
    their coming, and only those that were settled on the day belong to it."""

    day: int
    """Since 1970."""
    chain: int
    first: int
    last: int


class Period(NamedTuple):
    """What is in a period."""

    spans: Sequence[Span]
    digest: bytes | None
    """Of all its days, where they are closed: what is exported then never changes."""

    @property
    def num_rows(self) -> int:
        """At most so many, of all tenants."""
        return sum(span.last - span.first + 1 for span in self.spans)


async def period_of(connection: AsyncConnection, days: range) -> Period:
    """Every row of these days. Raises what the database raises."""
    columns = store.ledger_days.c
    query = sa.select(columns.day, columns.digest).where(columns.day >= days.start, columns.day < days.stop)
    digests = {row.day: row.digest for row in await connection.execute(query)}
    closed = store.ledger_closings.c
    covered = (
        sa.select(closed.day, closed.chain, closed.first_position, closed.last_position)
        .where(closed.day >= days.start, closed.day < days.stop, closed.last_position >= closed.first_position)
        .order_by(closed.day, closed.chain)
    )
    spans = [Span(*row) for row in await connection.execute(covered) if row.day in digests]
    first_closed, last_closed = (
        await connection.execute(sa.select(sa.func.min(columns.day), sa.func.max(columns.day)))
    ).one()
    first_open = days.start if last_closed is None else last_closed + 1
    for day in range(max(days.start, first_open), days.stop):
        # A row that is late for a closed day belongs to the first one that is open.
        takes_late = last_closed is not None and day == first_open
        spans += await _open_spans(connection, day, 0 if takes_late else day * DAY_S)
    is_final = last_closed is not None and days.stop <= last_closed + 1  # before the first day there was nothing
    digest = b"".join(digests.get(day, b"") for day in days if day >= first_closed) if is_final else None
    return Period(sorted([*spans, *await _spans_of_no_chain(connection, days)]), digest)


async def _open_spans(connection: AsyncConnection, day: int, since: int) -> list[Span]:
    """Of a day that is not closed: rows behind the last closing of their chain, settled from ``since`` (Unix s) until
    the day's end."""
    chains, rows, closed = store.ledger_chains, store.ledger.c, store.ledger_closings.c
    behind = sa.func.coalesce(
        sa.select(sa.func.max(closed.last_position)).where(closed.chain == chains.c.id).scalar_subquery(), 0
    )
    belongs = (rows.chain == chains.c.id) & (rows.position > behind) & (rows.settled_at < (day + 1) * DAY_S)
    if since:
        belongs &= rows.settled_at >= since
    bounds = (
        sa.select(chains.c.id, sa.func.min(rows.position), sa.func.max(rows.position))
        .select_from(chains.join(store.ledger, belongs))
        .group_by(chains.c.id)
        .order_by(chains.c.id)
    )
    return [Span(day, *row) for row in await connection.execute(bounds)]


async def _spans_of_no_chain(connection: AsyncConnection, days: range) -> list[Span]:
    """Nothing closes rows from before there were chains: they belong to the day that they were settled on."""
    rows = store.ledger.c
    day = (rows.settled_at - rows.settled_at % DAY_S).label("day")
    bounds = (
        sa.select(day, sa.func.min(rows.position), sa.func.max(rows.position))
        .where(rows.chain == NO_CHAIN, rows.settled_at >= days.start * DAY_S, rows.settled_at < days.stop * DAY_S)
        .group_by(day)
    )
    return [Span(at // DAY_S, NO_CHAIN, first, last) for at, first, last in await connection.execute(bounds)]


async def pages(rooms: Store, order: Order, spans: Sequence[Span]) -> AsyncIterator[tuple[Span, list[Entry]]]:
    """The rows of the spans, some at a time. Raises what the database raises."""
    columns = store.ledger.c
    for span in spans:
        position = span.first - 1
        while position < span.last:
            query = (
                sa.select(store.ledger)
                .where(columns.chain == span.chain, columns.position > position, columns.position <= span.last)
                .order_by(columns.position)
                .limit(PAGE_ROWS)
            )
            if span.chain == NO_CHAIN:
                start = span.day * DAY_S
                query = query.where(columns.settled_at >= start, columns.settled_at < start + DAY_S)
            if order.tenant_ids:
                query = query.where(columns.tenant_id.in_(order.tenant_ids))
            async with rooms.engine.connect() as connection:
                found = [Entry(*row) for row in await connection.execute(query)]
            if not found:
                break
            position = found[-1].position
            yield span, found
