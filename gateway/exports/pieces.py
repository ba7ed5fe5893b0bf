"""An export as pieces: rows that are written as one, and where the next ones begin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from gateway.exports import DAY_S, Order, costs, focus, spans, usage
from gateway.exports.columns import Columns, Row
from gateway.exports.names import Names
from gateway.exports.spans import Period, Span
from gateway.ledger.entry import Entry
from gateway.ledger.follow import number_strays
from gateway.prices import PriceHistory
from gateway.store import Store

PIECE_ROWS = 16_384
"""Of what is held in memory at once, and of a row group of Parquet."""


class Place(msgspec.Struct, frozen=True):
    """Where a piece ended: behind the row at this position. A piece of costs ends with its day."""

    day: int
    chain: int
    position: int


class Piece(NamedTuple):
    rows: list[Row]
    end: Place
    num_read: int
    """Rows of the ledger that are in it."""


class Export:
    """One order, and what was in its period when it began. No row is read before it is asked for."""

    def __init__(self, rooms: Store, order: Order, period: Period, names: Names) -> None:
        self._rooms = rooms
        self.order = order
        self.period = period
        self._names = names

    @classmethod
    async def begin(cls, rooms: Store, order: Order, tenants: tuple[str, ...] = ()) -> Export:
        """``tenants`` by ids or names, instead of the order's. Raises BadOrder for one that is not there, and what the
        database raises."""
        await number_strays(rooms)
        end = order.days.stop * DAY_S
        async with rooms.engine.connect() as connection:
            names = await Names.read(connection, end)
            order = msgspec.structs.replace(order, tenant_ids=names.ids_of(tenants) or order.tenant_ids)
            return cls(rooms, order, await spans.period_of(connection, order.days), names)

    @property
    def columns(self) -> Columns:
        if self.order.what == "usage":
            return usage.COLUMNS
        return focus.COLUMNS if self.order.format == "focus" else costs.COLUMNS

    def of(self, period: Period) -> Export:
        """The same of a period as it was found before."""
        return Export(self._rooms, self.order, period, self._names)

    def pieces(self, after: Place | None = None) -> AsyncIterator[Piece]:
        """Those behind ``after``. Raises what the database raises."""
        return self._usage(after) if self.order.what == "usage" else self._costs(after)

    async def _usage(self, after: Place | None) -> AsyncIterator[Piece]:
        rows: list[Row] = []
        async for span, entries in spans.pages(self._rooms, self.order, _behind(self.period.spans, after)):
            rows += usage.rows_of(entries, self._names, self.order.currency)
            num_over = len(rows) - PIECE_ROWS
            if num_over >= 0:
                last = entries[len(entries) - 1 - num_over]
                yield Piece(rows[:PIECE_ROWS], _place(span, last), PIECE_ROWS)
                rows = rows[PIECE_ROWS:]
        if rows:
            yield Piece(rows, _place(span, entries[-1]), len(rows))

    async def _costs(self, after: Place | None) -> AsyncIterator[Piece]:
        history = PriceHistory(self._rooms.engine)
        rest = [span for span in self.period.spans if after is None or span.day > after.day]
        for number in sorted({span.day for span in rest}):
            day = costs.Day(number)
            num_read, end = 0, Place(number, 0, 0)
            async for span, entries in spans.pages(self._rooms, self.order, [one for one in rest if one.day == number]):
                day.add(entries)
                num_read += len(entries)
                end = _place(span, entries[-1])
            lines = await day.lines(history)
            rows_of = focus.rows_of if self.order.format == "focus" else costs.rows_of
            if lines:
                yield Piece(rows_of(lines, self._names, self.order.currency), end, num_read)


def _behind(every: Sequence[Span], after: Place | None) -> list[Span]:
    if after is None:
        return list(every)
    rest = [span for span in every if (span.day, span.chain, span.last) > (after.day, after.chain, after.position)]
    return [
        span._replace(first=max(span.first, after.position + 1))
        if (span.day, span.chain) == (after.day, after.chain)
        else span
        for span in rest
    ]


def _place(span: Span, entry: Entry) -> Place:
    return Place(span.day, span.chain, entry.position)
