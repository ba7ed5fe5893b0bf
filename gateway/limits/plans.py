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
from policies.admission import NO_CEILING, Rule, Running
from policies.policy import Policy
from policies.pricelist import Priced

MAX_PLANS = 50_000
"""Kept at most; the oldest goes first and is made again when it is needed, which takes no longer than a request's way
through the gauges."""
NOBODY = "nobody"
"""Whose key a plan is of that is nobody's."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What one key's requests for one model in one class are held against, under one version of its policy."""

    policy: Policy
    tenant_id: str
    priced: Priced
    rules: tuple[Rule, ...]
    """Those of ``budgets`` are the last of them."""
    growing: tuple[Rule, ...]
    """Those of them that an answer is held against while it grows: tokens and money."""
    max_tokens: int
    """No request can have more; NO_CEILING without a ceiling on tokens."""
    budgets: tuple[Running, ...]
    """The tenant's, and the key's own."""
    is_hard: bool
    """One of them refuses."""


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
        if not shape.rules and not shape.budgets:
            return shape
        name = (id(policy), caller.tenant_id, caller.key_id, model, sla_class)
        plan = self._plans.get(name)
        if plan is None or (plan.budgets and not self._run(plan.budgets)):
            plan = self._named(shape, caller)
            _keep(self._plans, name, plan)
        return plan

    def spelled(
        self, policy: Policy, tenant_id: str, key_id: str, purse_id: str, models: Sequence[str]
    ) -> tuple[list[tuple[Rule, str]], tuple[Running, ...]]:
        """Every rule of this tenant and key, with the model that it is about, those of the budgets last, and these:
        made for whoever looks, and not kept."""
        scopes = ("tenant", "key") if key_id else ("tenant",)
        rules = [(rule, "") for rule in admission.rules_for(policy, tenant_id, key_id, "") if rule.scope in scopes]
        for model in models:
            of_all = admission.rules_for(policy, tenant_id, key_id, model)
            rules += [(rule, model) for rule in of_all if rule.scope == "model"]
        budgets = admission.running(policy, tenant_id, key_id, purse_id or key_id, self._wall())
        return [*rules, *((each.rule, "") for each in budgets)], budgets

    def _shape_of(self, caller: Caller, model: str, sla_class: str) -> Plan:
        policy, rules = caller.policy, admission.rules_on(caller.policy, model)
        budgets = admission.running(policy, "", NOBODY, NOBODY, self._wall())
        return Plan(
            policy=policy,
            tenant_id="",
            priced=self._prices.find(caller, model, sla_class),
            rules=rules,
            growing=(),
            max_tokens=min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING),
            budgets=budgets,
            is_hard=any(each.budget.hard for each in budgets),
        )

    def _named(self, shape: Plan, caller: Caller) -> Plan:
        tenant_id, key_id = caller.tenant_id, caller.key_id
        budgets = admission.running(shape.policy, tenant_id, key_id, caller.purse_id or key_id, self._wall())
        rules = (*admission.named(shape.rules, tenant_id, key_id), *(each.rule for each in budgets))
        growing = tuple([rule for rule in rules if rule.kind == "tokens" or rule.kind == "money"])
        return Plan(
            shape.policy,
            tenant_id,
            shape.priced,
            rules,
            growing,
            shape.max_tokens,
            budgets,
            shape.is_hard,
        )

    def _run(self, budgets: Sequence[Running]) -> bool:
        """Whether none of their periods is over, or has yet to begin."""
        now = self._wall()
        return all(each.period.starts_at <= now < each.period.ends_at for each in budgets)


def _keep(plans: OrderedDict[Any, Plan], name: object, plan: Plan) -> None:
    if len(plans) >= MAX_PLANS:
        plans.popitem(last=False)
    plans[name] = plan
