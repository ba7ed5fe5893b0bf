"""Which rules a request is held against: spelled out once for a policy, a key and a model, then looked up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from policies import admission, pricing
from policies.admission import NO_CEILING, Period, Rule
from policies.policy import Policy
from policies.pricing import Rates

MAX_PLANS = 50_000
"""Kept at most; the oldest goes first and is made again when it is needed."""


class Plan(msgspec.Struct, frozen=True):
    """What one key's requests for one model are held against, under one version of its policy."""

    policy: Policy
    tenant_id: str
    rates: Rates
    rules: tuple[Rule, ...]
    """The budget is the last of them, if there is one."""
    growing: tuple[Rule, ...]
    """Those of them that an answer is held against while it grows: tokens and money."""
    max_tokens: int
    """No request can have more; NO_CEILING without a ceiling on tokens."""
    period: Period | None
    """Of the budget."""
    is_hard: bool
    """There is a budget, and it refuses."""
    is_free: bool


class Plans:
    """All that were needed lately."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        """``wall``: Unix seconds; the periods of budgets go by it."""
        self._wall = wall
        self._open: dict[tuple[int, str], Plan] = {}
        """Of policies that limit nothing: one for all tenants and keys."""
        self._plans: dict[tuple[int, str, str, str], Plan] = {}

    def find(self, policy: Policy, tenant_id: str, key_id: str, model: str) -> Plan:
        # A plan holds its policy, so while it is here no other policy can have the same id.
        plan = self._open.get((id(policy), model))
        if plan is not None:
            return plan
        name = (id(policy), tenant_id, key_id, model)
        plan = self._plans.get(name)
        if plan is None or (plan.period is not None and self._wall() >= plan.period.ends_at):
            plan = plan_for(policy, tenant_id, key_id, model, self._wall())
            if plan.rules:
                _keep(self._plans, name, plan)
            else:
                _keep(self._open, (id(policy), model), plan)
        return plan


def _keep(plans: dict[Any, Plan], name: object, plan: Plan) -> None:
    if len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]
    plans[name] = plan


def plan_for(policy: Policy, tenant_id: str, key_id: str, model: str, unix_s: float) -> Plan:
    rules = admission.rules_for(policy, tenant_id, key_id, model)
    period = None
    if policy.budget is not None:
        period = admission.period_of(policy.budget.period, unix_s)
        rules += (admission.budget_rule(policy.budget, tenant_id, period),)
    rates = pricing.rates_of(policy.price_of(model))
    return Plan(
        policy=policy,
        tenant_id=tenant_id,
        rates=rates,
        rules=rules,
        growing=tuple(rule for rule in rules if rule.kind in ("tokens", "money")),
        max_tokens=min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING),
        period=period,
        is_hard=policy.budget is not None and policy.budget.hard,
        is_free=rates.is_free,
    )
