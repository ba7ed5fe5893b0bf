"""Billing exports: a row for each request, or a line for each kind of thing paid for, by day and tenant.

What belongs to a period is said by the ledger's closings: the rows of a closed day are those that its closings cover,
in the order of their chains, so that it is exported to the same bytes however often, and a row that came late is in the
next day. Days that are not closed have what is there. Rows from before there were chains, which nothing closes, are in
the day that they were settled on.
"""

from __future__ import annotations

import datetime
from typing import Literal, get_args

import msgspec

What = Literal["usage", "costs"]
Format = Literal["csv", "jsonl", "parquet", "focus"]
FORMATS: tuple[Format, ...] = get_args(Format)
MAX_DAYS = 400
DAY_S = 86_400
EPOCH = datetime.date(1970, 1, 1)


class BadOrder(ValueError):
    """What is asked cannot be exported; ``field`` is the part of it that is at fault."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field} {what}")
        self.field, self.what = field, what


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to export."""

    what: What
    format: Format
    from_: datetime.date
    """The first day, in UTC."""
    to: datetime.date
    """The day after the last one."""
    tenant_ids: tuple[str, ...] = ()
    """Of these alone; empty: of all."""
    currency: str = "USD"

    @property
    def days(self) -> range:
        """Days since 1970."""
        return range((self.from_ - EPOCH).days, (self.to - EPOCH).days)


def check(order: Order, today: datetime.date) -> None:
    """Raises BadOrder."""
    if order.from_ >= order.to:
        raise BadOrder("to", "must be a later day than where it begins; it is the first day that is left out")
    if (order.to - order.from_).days > MAX_DAYS:
        raise BadOrder("to", f"must be at most {MAX_DAYS} days after where it begins; export longer periods in parts")
    if order.from_ > today:
        raise BadOrder("from", "is in the future")
    if order.format == "focus" and order.what != "costs":
        raise BadOrder("format", "focus is a format of costs")


def day_of(number: int) -> datetime.date:
    """Of days since 1970."""
    return EPOCH + datetime.timedelta(days=number)
