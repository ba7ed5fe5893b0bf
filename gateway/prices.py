"""What things cost: for a request that comes now, from memory; for a row of the ledger, from the store, the same for
ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import store
from policies import pricelist, pricing
from policies.policy import Price
from policies.pricelist import Origin, Priced, PriceList, Terms
from policies.pricing import Rates

if TYPE_CHECKING:
    from gateway.auth import Caller

MAX_KNOWN = 50_000
"""Prices of the past kept at hand; past it they are read again."""


class Board(Protocol):
    """Where the list hangs."""

    prices: PriceList
    """As it is known now; another one whenever it has changed."""


class Bare:
    """Nothing is on it."""

    def __init__(self) -> None:
        self.prices = PriceList()


class Prices:
    """In force now. Entries of the list that come into force, or arrive, count for the requests that come after."""

    def __init__(
        self,
        board: Board | None = None,
        wall: Callable[[], float] = time.time,
        base_of: Callable[[str], str | None] = lambda model: None,
    ) -> None:
        """``base_of``: the model that one of this name is an adapter of. ``board``: None: policies name their own
        prices, and there are no others. ``wall``: Unix seconds.
        """
        self._board = board or Bare()
        self._wall = wall
        self._base_of = base_of
        self._list = self._board.prices
        self._since = wall()
        self._until = self._list.changes_at(self._since)

    def have_changed(self) -> bool:
        """Since this was asked before: what was found until then counts no more for requests to come. A clock that was
        ahead and is set back changes them too."""
        if self._board.prices is self._list and self._since <= self._wall() < self._until:
            return False
        self._list = self._board.prices
        self._since = self._wall()
        self._until = self._list.changes_at(self._since)
        return True

    def find(self, caller: Caller, model: str, sla_class: str) -> Priced:
        """For a request that is admitted now."""
        name, version = caller.policy_name, caller.policy_version
        base = self._base_of(model)
        return pricelist.priced(caller.policy, name, version, self._list, model, sla_class, self._wall(), base)


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
        return pricelist.own_price(named.prices, origin.model or model)


class _Named(msgspec.Struct):
    """Of a policy's document, whatever else it says."""

    prices: dict[str, Price] = {}
