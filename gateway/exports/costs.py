"""A line for each kind of thing that was paid for: by day, tenant, key, model, class, price, and whether it corrects.

A line's cost is its part of what the rows cost: the lines of a day add up to its rows exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

from gateway.exports import day_of
from gateway.exports.columns import Column, Row, money
from gateway.exports.names import Names
from gateway.ledger.entry import Entry
from gateway.ledger.sums import price_version_of
from gateway.prices import PriceHistory
from policies import pricing
from policies.pricelist import Origin
from policies.pricing import FROM_CACHE, PARTS, Kind, Rates
from policies.terms import Usage

NO_RATES = Rates(0, 0, 0, 0, 0, 0, 0)
UNITS: dict[Kind, tuple[str, int]] = {
    "prompt": ("Tokens", 1),
    "cached_prompt": ("Tokens", 1),
    "completion": ("Tokens", 1),
    "reasoning": ("Tokens", 1),
    "cache_hit": ("Tokens", 1),
    "request": ("Requests", 1),
    "engine_second": ("Seconds", 1_000_000),
}
"""What a quantity is counted in, and how many of ``pricing.quantities`` make one."""

COLUMNS = (
    Column("day", "day"),
    Column("tenant_id", "text"),
    Column("tenant_name", "text"),
    Column("key_id", "text"),
    Column("model", "text"),
    Column("sla_class", "text"),
    Column("kind", "text"),
    Column("correction", "text"),
    Column("num_requests", "count"),
    Column("quantity", "number"),
    Column("unit", "text"),
    Column("list_cost", "money"),
    Column("cost", "money"),
    Column("currency", "text"),
    Column("price_version", "text"),
)


class Group(NamedTuple):
    """What rows that are summed have in common."""

    tenant_id: str
    key_id: str
    model: str
    sla_class: str
    price_version: str
    is_from_cache: bool
    is_correction: bool


class Sums:
    """Of the rows of one group."""

    __slots__ = ("cached", "completion", "cost", "engine_us", "owing", "prompt", "reasoning", "requests")

    def __init__(self) -> None:
        self.requests = self.owing = self.engine_us = self.cost = 0
        self.prompt = self.cached = self.completion = self.reasoning = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt, self.cached, self.completion, self.reasoning)


class Line(NamedTuple):
    """One line; costs in micro-units."""

    day: int
    """Since 1970."""
    group: Group
    kind: Kind
    num_requests: int
    quantity: float
    """In units of ``UNITS``."""
    rate: int
    """``pricing.PARTS`` of a micro-unit, for what ``pricing.quantities`` counts."""
    list_rate: int
    """The same without the tenant's discount."""
    cost: int
    list_cost: int


class Day:
    """The rows of one day, summed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._groups: dict[Group, Sums] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """In any order."""
        groups = self._groups
        for entry in entries:
            group = Group(
                entry.tenant_id,
                entry.key_id,
                entry.model,
                entry.sla_class,
                price_version_of(entry),
                entry.cache in FROM_CACHE,
                entry.corrects is not None,
            )
            sums = groups.get(group)
            if sums is None:
                sums = groups[group] = Sums()
            sums.requests += 1
            if entry.is_owed:
                sums.owing += 1
                sums.engine_us += entry.engine_us
            sums.prompt += entry.num_prompt_tokens
            sums.cached += entry.num_cached_tokens
            sums.completion += entry.num_completion_tokens
            sums.reasoning += entry.num_reasoning_tokens
            sums.cost += entry.cost_micros

    async def lines(self, history: PriceHistory) -> list[Line]:
        """In an order that is the rows' alone. Raises what the database raises."""
        lines = []
        for group, sums in sorted(self._groups.items()):
            rates = await _rates(history, group.price_version, group.model)
            listed = await _rates(history, _undiscounted(group.price_version), group.model)
            outcome = "hit" if group.is_from_cache else "miss"
            # A correction is no request, and corrects what its row says.
            num_requests, num_owing = (0, 0) if group.is_correction else (sums.requests, sums.owing)
            quantities = pricing.quantities(sums.usage, outcome, sums.engine_us, num_owing)
            parts = pricing.parts(rates, sums.usage, outcome, sums.engine_us, num_owing, sums.cost)
            for kind in sorted(quantities.keys() | parts.keys()):
                quantity, rate, list_rate = quantities.get(kind, 0), getattr(rates, kind), getattr(listed, kind)
                cost = parts.get(kind, 0)
                lines.append(
                    Line(
                        self.number,
                        group,
                        kind,
                        num_requests,
                        quantity / UNITS[kind][1],
                        rate,
                        list_rate,
                        cost,
                        cost if list_rate == rate else cost + _rounded((list_rate - rate) * quantity),
                    )
                )
        return lines


def rows_of(lines: Iterable[Line], names: Names, currency: str) -> list[Row]:
    """In the same order."""
    return [
        (
            day_of(line.day),
            line.group.tenant_id,
            names.of(line.group.tenant_id),
            line.group.key_id,
            line.group.model,
            line.group.sla_class,
            line.kind,
            "yes" if line.group.is_correction else "no",
            line.num_requests,
            line.quantity,
            UNITS[line.kind][0],
            money(line.list_cost),
            money(line.cost),
            currency,
            line.group.price_version,
        )
        for line in lines
    ]


async def _rates(history: PriceHistory, price_version: str, model: str) -> Rates:
    try:
        return await history.rates(price_version, model)
    except LookupError:  # of a store that was mended by hand: the cost stands, its parts are not known
        return NO_RATES


def _undiscounted(price_version: str) -> str:
    try:
        origin = Origin.of(price_version)
    except ValueError:
        return price_version
    return price_version if origin is None else str(origin._replace(discount=Decimal(0)))


def _rounded(parts: int) -> int:
    """To whole micro-units, half to even."""
    micros, rest = divmod(parts, PARTS)
    return micros + (2 * rest > PARTS or (2 * rest == PARTS and micros % 2 == 1))
