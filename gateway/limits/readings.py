"""How ceilings stand, for whoever administers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies import pricing
from policies.admission import Rule, Running, Scope
from policies.policy import Budget


class Reading(msgspec.Struct, frozen=True):
    """One ceiling and its gauge, for whoever administers."""

    limit: str
    """The policy's word for it, or "budget"."""
    scope: Scope
    model: str
    """Empty unless it is a ceiling on one."""
    ceiling: int
    """Of a soft budget too, although it refuses nothing."""
    used: int
    reset_ms: int
    """Until a window is empty if nothing more comes, or the budget's next period begins; 0 for open requests."""
    budget: Budget | None = None
    """Whose it is, if it is one's."""


def readings_of(
    named: Sequence[tuple[Rule, str]], budgets: Sequence[Running], told: Sequence[int], now: float
) -> list[Reading]:
    """``named`` and ``budgets`` as ``Plans.spelled`` has them, ``told`` as ``admission.readings``; ``now``: Unix
    seconds."""
    readings = []
    for index, (rule, model) in enumerate(named):
        ceiling, used, reset_ms, budget = rule.ceiling, told[2 * index], told[2 * index + 1], None
        if rule.kind == "money":
            running = budgets[index - len(named)]
            budget = running.budget
            ceiling = pricing.budget_micros(budget.amount)
            reset_ms = max(0, int(1e3 * (running.period.ends_at - now)))
        readings.append(Reading(rule.limit, rule.scope, model, ceiling, used, reset_ms, budget))
    return readings
