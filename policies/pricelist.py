"""The price list: what is in force for a model and a class at an instant, and the words by which a row of the ledger
remembers its price for ever."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from policies import pricing
from policies.policy import ANY, FREE, Document, Policy, Price
from policies.pricing import Rates

NO_PRICE = "free"
"""The price version of what neither a policy nor the list has a price for."""


class Proposed(Document, frozen=True, kw_only=True):
    """What operators write to put a price on the list."""

    model: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00]+$(?!\n\x00)")] = ANY
    sla_class: str = ANY
    price: Price | None
    """None: the model and class have no entry of their own any more."""
    currency: str | None = None
    """That of [billing], which it always is."""


class Terms(Document, frozen=True):
    """An entry as it is kept."""

    currency: str
    price: Price | None = None


class Listed(msgspec.Struct, frozen=True, gc=False):
    """One entry of the list, which is never changed; a later one of the same model and class takes its place."""

    version: int
    model: str
    """``ANY``: each that has no entry of its own, as with classes."""
    sla_class: str
    effective_from: int
    """Unix seconds. Of entries from the same instant the newest version counts."""
    price: Price | None
    """None: from then on this model and class have no entry of their own."""


class PriceList:
    """Immutable."""

    def __init__(self, entries: Iterable[Listed] = ()) -> None:
        self._by_place: dict[tuple[str, str], list[Listed]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.effective_from, entry.version)):
            self._by_place.setdefault((entry.model, entry.sla_class), []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self._by_place.values()))

    def find(self, model: str, sla_class: str, unix_s: float) -> Listed | None:
        """The most particular one in force: a model goes before a class."""
        for place in ((model, sla_class), (model, ANY), (ANY, sla_class), (ANY, ANY)):
            entry = _in_force(self._by_place.get(place, ()), unix_s)
            if entry is not None and entry.price is not None:
                return entry
        return None

    def names(self, model: str, unix_s: float) -> bool:
        """Whether a price of this very model is in force, for whichever class."""
        return any(
            (entry := _in_force(kept, unix_s)) is not None and entry.price is not None
            for (named, _), kept in self._by_place.items()
            if named == model
        )

    def changes_at(self, unix_s: float) -> float:
        """When the next entry comes into force; infinity: no time is known."""
        later = (
            entries[start] for entries in self._by_place.values() if (start := _start(entries, unix_s)) < len(entries)
        )
        return min((entry.effective_from for entry in later), default=math.inf)

    def in_force(self, unix_s: float) -> list[Listed]:
        """Each place's."""
        entries = (_in_force(kept, unix_s) for _, kept in sorted(self._by_place.items()))
        return [entry for entry in entries if entry is not None and entry.price is not None]

    def extended(self, entries: Iterable[Listed], unix_s: float) -> PriceList:
        """With these, and without those whose time is over."""
        every = PriceList([*(entry for kept in self._by_place.values() for entry in kept), *entries])
        for place, kept in every._by_place.items():
            every._by_place[place] = kept[max(0, _start(kept, unix_s) - 1) :]
        return every


def _start(entries: list[Listed], unix_s: float) -> int:
    """How many of them have come into force."""
    return bisect.bisect_right(entries, unix_s, key=lambda entry: entry.effective_from)


def _in_force(entries: list[Listed] | tuple[()], unix_s: float) -> Listed | None:
    return entries[count - 1] if entries and (count := _start(entries, unix_s)) else None


class Priced(msgspec.Struct, frozen=True, gc=False):
    """What a request costs, and the words for it."""

    rates: Rates
    version: str
    """From which ``Origin.of`` knows where it came from."""
    is_free: bool


def priced(
    policy: Policy,
    name: str,
    version: int,
    prices: PriceList,
    model: str,
    sla_class: str,
    unix_s: float,
    base: str | None = None,
) -> Priced:
    """For a request admitted at this instant under this version of the policy: the policy's own price for the model, or
    else the list's, less the policy's discount. ``base``: the model that this one is an adapter of, whose price it has
    unless it is named itself."""
    of_base = ""
    if base is not None and model not in policy.prices and not prices.names(model, unix_s):
        model = of_base = base
    price, origin = own_price(policy.prices, model), Origin(None, name, version, policy.discount, of_base)
    if price is None:
        entry = prices.find(model, sla_class, unix_s)
        if entry is None or entry.price is None:
            return UNPRICED
        price, origin = entry.price, Origin(entry.version, "", 0, policy.discount)
    rates = pricing.rates_of(price, policy.discount)
    return Priced(rates, str(origin), rates.is_free)


UNPRICED = Priced(pricing.rates_of(FREE), NO_PRICE, is_free=True)


def own_price(prices: Mapping[str, Price], model: str) -> Price | None:
    """Of a policy that names these."""
    return prices.get(model) or prices.get(ANY)


OF_BATCH = ";batch"
"""The end of what the row of a batch's line says of its price, whatever else stands there."""


class Origin(NamedTuple):
    """Where a row's price came from: ``list:7`` or ``policy:gold@3``, and ``;discount=0.1`` if there was one."""

    list_version: int | None
    """None: it is a policy's."""
    policy_name: str
    policy_version: int
    discount: Decimal
    model: str = ""
    """The one whose price it is, where it is not that of the row: an adapter without a price has its model's."""

    @classmethod
    def of(cls, price_version: str) -> Origin | None:
        """None where there was no price, or none was noted. Raises ValueError for words that are none of these."""
        price_version = price_version.removesuffix(OF_BATCH)
        if price_version in ("", NO_PRICE):
            return None
        found = _ORIGIN.fullmatch(price_version)
        if found is None:
            raise ValueError(f"{price_version!r} names no price")
        listed, name, version, model, discount = found.groups()
        return cls(int(listed) if listed else None, name or "", int(version or 0), Decimal(discount or 0), model or "")

    def __str__(self) -> str:
        where = f"policy:{self.policy_name}@{self.policy_version}"
        if self.list_version is not None:
            where = f"list:{self.list_version}"
        elif self.model:
            where += f";model={self.model}"
        digits = f"{self.discount:.{pricing.NUM_DISCOUNT_DIGITS}f}".rstrip("0").rstrip(".")
        return f"{where};discount={digits}" if self.discount else where


_ORIGIN = re.compile(r"(?:list:(\d{1,18})|policy:([^@;]+)@(\d{1,18})(?:;model=(.+?))?)(?:;discount=(0\.\d{1,4}))?")
