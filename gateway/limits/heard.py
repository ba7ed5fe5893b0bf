"""What is spent of shared budgets, as a gateway last heard of it: it goes by that while Redis is away, and tells it to
one that has lost it."""

from __future__ import annotations

import msgspec

from gateway.limits.memory import Meters
from policies.admission import Running


class Sum(msgspec.Struct):
    """Of one budget in one period, in micro-units."""

    rule: str
    """Its name says when the period began."""
    spent: int = 0
    """By all gateways together."""
    alone: int = 0
    """Of that, what the gateway's own purse has as well: it was spent without Redis."""


class Heard:
    """One gateway's."""

    def __init__(self, local: Meters) -> None:
        """``local`` has its own purses, which count what is spent without Redis."""
        self._local = local
        self._sums: dict[tuple[str, str], Sum] = {}
        """By purse and length of the period."""

    def has(self, of: Running) -> bool:
        """Something of this budget in its period."""
        known = self._sums.get((of.purse_id, of.budget.period))
        return known is not None and known.rule == of.rule.name

    def spent(self, of: Running) -> int:
        """By all."""
        return self._sum(of).spent

    def before(self, of: Running) -> int:
        """The same without what the gateway's own purse has."""
        total, held = self._local.readings([of.rule])
        known = self._sum(of)
        return known.spent - min(known.alone, total - held)

    def hear(self, of: Running, spent_micros: int) -> None:
        """So much is spent, unless it is known to be more: Redis may have lost some of it."""
        known = self._sum(of)
        if not self.has(of) or known.spent < spent_micros:
            self._keep(of, spent_micros, known.alone)

    def add(self, of: Running, cost_micros: int, is_alone: bool) -> None:
        """Redis was not there to be told; ``is_alone``: the gateway's own purse has it."""
        known = self._sum(of)
        self._keep(of, known.spent + cost_micros, known.alone + (cost_micros if is_alone else 0))

    def forget_here(self, of: Running) -> None:
        """The gateway's own purse begins anew: all of it is known to Redis."""
        self._local.forget(of.rule)
        if self.has(of):
            self._sum(of).alone = 0

    def _sum(self, of: Running) -> Sum:
        known = self._sums.get((of.purse_id, of.budget.period))
        return known if known is not None and known.rule == of.rule.name else Sum(of.rule.name)

    def _keep(self, of: Running, spent: int, alone: int) -> None:
        self._sums[of.purse_id, of.budget.period] = Sum(of.rule.name, spent, alone)
