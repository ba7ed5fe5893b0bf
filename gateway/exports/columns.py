"""A table on its way out: its columns, and a row as a tuple of plain values."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

Type = Literal["text", "count", "number", "money", "price", "instant", "day"]
"""A count is an integer, a number a float, money a Decimal with six digits after the point, a price one with ten, an
instant has UTC's time zone."""
Value = str | int | float | Decimal | datetime.datetime | datetime.date | None
Row = tuple[Value, ...]


class Column(NamedTuple):
    """``type`` is what its values are, where they are not None."""

    name: str
    type: Type


Columns = Sequence[Column]


def money(micros: int) -> Decimal:
    """In units of the currency."""
    return Decimal(micros).scaleb(-6)


def instant(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
