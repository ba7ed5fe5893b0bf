"""What things cost: for a request that comes now, from memory; for a row of the ledger, from the store, the same for
ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import store
from policies import pricelist, pricing
from policies.policy import Policy, Price
from policies.pricelist import Origin, Priced, PriceList, Terms
from policies.pricing import Rates

if TYPE_CHECKING:
    from gateway.auth import Caller

MAX_KNOWN = 50_000
"""Prices kept at hand; past it they are worked out again."""


NOTHING = PriceList()


class Prices:
    """In force now. Entries of the list that come into force, or arrive, count for the requests that come after."""

    def __init__(
        self, listed: Callable[[], PriceList] = lambda: NOTHING, wall: Callable[[], float] = time.time
    ) -> None:
        """``listed``: the list as it is known now, another object whenever it has changed. ``wall``: Unix seconds."""
        self._listed = listed
        self._wall = wall
        self._list = listed()
        self._until = self._list.changes_at(wall())
        self._known: dict[tuple[int, str, str], tuple[Policy, Priced]] = {}

    def find(self, caller: Caller, model: str, sla_class: str) -> Priced:
        """For a request that is admitted now."""
        listed = self._listed()
        if listed is not self._list or self._wall() >= self._until:
            self._known.clear()
            self._list, self._until = listed, listed.changes_at(self._wall())
        # The policy is kept with its price, so while that is here no other policy can have the same id.
        name = (id(caller.policy), model, sla_class)
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = pricelist.priced(
                caller.policy, caller.policy_name, caller.policy_version, self._list, model, sla_class, self._wall()
            )
            known = self._known[name] = (caller.policy, found)
        return known[1]


class PriceHistory:
    """What ever was in force. None of it changes, so what was read once is known."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[str, str], Rates] = {}

    async def rates(self, price_version: str, model: str) -> Rates:
        """By which the cost of a row of this model with this ``price_version`` was counted; free where it has none.

        Raises LookupError where the store has no such price, and what the database raises.
        """
        known = self._known.get((price_version, model))
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[price_version, model] = await self._read(price_version, model)
        return known

    async def _read(self, price_version: str, model: str) -> Rates:
        try:
            origin = Origin.of(price_version)
            if origin is None:
                return pricelist.UNPRICED.rates
            price = await (self._of_policy(origin, model) if origin.list_version is None else self._listed(origin))
        except ValueError as error:  # of another version of Penstock, or damaged
            raise LookupError(f"the price {price_version} cannot be read: {error}") from None
        if price is None:
            raise LookupError(f"there is no price {price_version} for {model}")
        return pricing.rates_of(price, origin.discount)

    async def _listed(self, origin: Origin) -> Price | None:
        query = sa.select(store.prices.c.document).where(store.prices.c.version == origin.list_version)
        async with self._engine.connect() as connection:
            document = (await connection.execute(query)).scalar()
        return None if document is None else msgspec.json.decode(document, type=Terms).price

    async def _of_policy(self, origin: Origin, model: str) -> Price | None:
        columns = store.policies.c
        query = sa.select(columns.document).where(
            columns.name == origin.policy_name, columns.version == origin.policy_version
        )
        async with self._engine.connect() as connection:
            document = (await connection.execute(query)).scalar()
        named = _Named() if document is None else msgspec.json.decode(document, type=_Named)
        return pricelist.own_price(named.prices, model)


class _Named(msgspec.Struct):
    """Of a policy's document, whatever else it says."""

    prices: dict[str, Price] = {}
