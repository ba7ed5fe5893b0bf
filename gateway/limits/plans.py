"""Which rules a request is held against: spelled out once for a policy and a model, and named once for each key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from policies import admission
from policies.admission import NO_CEILING, Period, Rule
from policies.policy import Policy

MAX_PLANS = 50_000
"""Kept at most; the oldest goes first and is made again when it is needed, which takes no longer than a request's way
through the gauges."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What one key's requests for one model are held against, under one version of its policy."""

    policy: Policy
    tenant_id: str
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

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        """``wall``: Unix seconds; the periods of budgets go by it."""
        self._wall = wall
        self._shapes: OrderedDict[tuple[int, str], Plan] = OrderedDict()
        """By policy and model: plans of nobody. Where they have no rules they are everybody's."""
        self._plans: OrderedDict[tuple[int, str, str, str], Plan] = OrderedDict()

    def find(self, policy: Policy, tenant_id: str, key_id: str, model: str) -> Plan:
        # A plan holds its policy, so while it is here no other policy can have the same id.
        shape = self._shapes.get((id(policy), model))
        if shape is None:
            shape = _shape_of(policy, model)
            _keep(self._shapes, (id(policy), model), shape)
        if not shape.rules and policy.budget is None:
            return shape
        name = (id(policy), tenant_id, key_id, model)
        plan = self._plans.get(name)
        if plan is None or (plan.period is not None and self._wall() >= plan.period.ends_at):
            plan = self._named(shape, tenant_id, key_id)
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

    def _named(self, shape: Plan, tenant_id: str, key_id: str) -> Plan:
        rules, budget, period = admission.named(shape.rules, tenant_id, key_id), shape.policy.budget, None
        if budget is not None:
            period = admission.period_of(budget.period, self._wall())
            rules += (admission.budget_rule(budget, tenant_id, period),)
        growing = tuple([rule for rule in rules if rule.kind == "tokens" or rule.kind == "money"])
        return Plan(
            shape.policy,
            tenant_id,
            rules,
            growing,
            shape.max_tokens,
            period,
            shape.is_hard,
        )


def _shape_of(policy: Policy, model: str) -> Plan:
    rules = admission.rules_on(policy, model)
    return Plan(
        policy=policy,
        tenant_id="",
        rules=rules,
        growing=(),
        max_tokens=min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING),
        period=None,
        is_hard=policy.budget is not None and policy.budget.hard,
    )


def _keep(plans: OrderedDict[Any, Plan], name: object, plan: Plan) -> None:
    if len(plans) >= MAX_PLANS:
        plans.popitem(last=False)
    plans[name] = plan
