"""Which rules a request is held against, and what it costs: spelled out once for a policy, a model and a class, and
named once for each key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.auth import Caller
from gateway.prices import Prices
from policies import admission
from policies.admission import NO_CEILING, Period, Rule
from policies.policy import Policy
from policies.pricelist import Priced

MAX_PLANS = 50_000
"""Kept at most; the oldest goes first and is made again when it is needed, which takes no longer than a request's way
through the gauges."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What one key's requests for one model in one class are held against, under one version of its policy."""

    policy: Policy
    tenant_id: str
    priced: Priced
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


class Plans:
    """All that were needed lately."""

    def __init__(self, prices: Prices | None = None, wall: Callable[[], float] = time.time) -> None:
        """``prices``: None: policies name their own, and there are no others. ``wall``: Unix seconds; the periods of
        budgets go by it."""
        self._prices = prices or Prices(wall=wall)
        self._wall = wall
        self._shapes: OrderedDict[tuple[int, str, str], Plan] = OrderedDict()
        """By policy, model and class: plans of nobody. Where they have no rules they are everybody's."""
        self._plans: OrderedDict[tuple[int, str, str, str, str], Plan] = OrderedDict()

    def find(self, caller: Caller, model: str, sla_class: str = "standard") -> Plan:
        if self._prices.have_changed():
            self._shapes.clear()
            self._plans.clear()
        policy = caller.policy
        # A plan holds its policy, so while it is here no other policy can have the same id.
        shape = self._shapes.get((id(policy), model, sla_class))
        if shape is None:
            shape = self._shape_of(caller, model, sla_class)
            _keep(self._shapes, (id(policy), model, sla_class), shape)
        if not shape.rules and policy.budget is None:
            return shape
        name = (id(policy), caller.tenant_id, caller.key_id, model, sla_class)
        plan = self._plans.get(name)
        if plan is None or not (plan.period is None or plan.period.starts_at <= self._wall() < plan.period.ends_at):
            plan = self._named(shape, caller.tenant_id, caller.key_id)
            _keep(self._plans, name, plan)
        return plan

    def spelled(
        self, policy: Policy, tenant_id: str, key_id: str, models: Sequence[str]
    ) -> tuple[list[tuple[Rule, str]], Period | None]:
        """Every rule of this tenant and key, with the model that it is about, and the budget's period: made for
        whoever looks, and not kept."""
        scopes = ("tenant", "key") if key_id else ("tenant",)
        rules = [(rule, "") for rule in admission.rules_for(policy, tenant_id, key_id, "") if rule.scope in scopes]
        for model in models:
            of_all = admission.rules_for(policy, tenant_id, key_id, model)
            rules += [(rule, model) for rule in of_all if rule.scope == "model"]
        if policy.budget is None:
            return rules, None
        period = admission.period_of(policy.budget.period, self._wall())
        return [*rules, (admission.budget_rule(policy.budget, tenant_id, period), "")], period

    def _shape_of(self, caller: Caller, model: str, sla_class: str) -> Plan:
        policy, rules = caller.policy, admission.rules_on(caller.policy, model)
        return Plan(
            policy=policy,
            tenant_id="",
            priced=self._prices.find(caller, model, sla_class),
            rules=rules,
            growing=(),
            max_tokens=min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING),
            period=None,
            is_hard=policy.budget is not None and policy.budget.hard,
        )

    def _named(self, shape: Plan, tenant_id: str, key_id: str) -> Plan:
        rules, budget, period = admission.named(shape.rules, tenant_id, key_id), shape.policy.budget, None
        if budget is not None:
            period = admission.period_of(budget.period, self._wall())
            rules += (admission.budget_rule(budget, tenant_id, period),)
        growing = tuple([rule for rule in rules if rule.kind == "tokens" or rule.kind == "money"])
        return Plan(
            shape.policy,
            tenant_id,
            shape.priced,
            rules,
            growing,
            shape.max_tokens,
            period,
            shape.is_hard,
        )


def _keep(plans: OrderedDict[Any, Plan], name: object, plan: Plan) -> None:
    if len(plans) >= MAX_PLANS:
        plans.popitem(last=False)
    plans[name] = plan
