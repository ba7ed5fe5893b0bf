"""Limits and budgets in a simulation: the gauges of policies/rate.py under the decisions of policies/admission.py.

What a gateway does around them while it waits for the network stands here without the waiting: reserve, top up, settle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from policies import admission, pricelist, pricing
from policies.admission import NO_CEILING, Ask, Grant, Refusal, Rule, Running
from policies.policy import Policy
from policies.pricelist import PriceList
from policies.pricing import Rates
from policies.rate import Gauge, Leases, Purse
from policies.simulation.trial import Reason
from policies.terms import Usage


class Plan(msgspec.Struct, frozen=True):
    """What a tenant's requests by one key for one model are held against."""

    rules: tuple[Rule, ...]
    growing: tuple[Rule, ...]
    """Those that an answer is held against while it is written."""
    rates: Rates
    max_tokens: int
    """No request can have more."""
    budgets: tuple[Running, ...]
    is_hard: bool


class Ticket:
    """What is set aside for one request."""

    __slots__ = ("covered", "grants", "held_micros", "max_completion_tokens", "num_prompt_tokens", "plan", "request_id")

    def __init__(self, plan: Plan, request_id: str, num_prompt_tokens: int, max_completion_tokens: int) -> None:
        self.plan = plan
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_completion_tokens = max_completion_tokens
        self.grants: list[tuple[int, int]] = []
        self.held_micros = 0
        self.covered = NO_CEILING
        """Completion tokens that may be written so far."""

    def note(self, grant: Grant) -> None:
        """So much more is set aside."""
        tokens = NO_CEILING
        if self.plan.max_tokens != NO_CEILING:
            self.grants.append((grant.at_ms, grant.tokens))
            tokens = self.num_granted - self.num_prompt_tokens
        paid: int | None = None
        if self.plan.is_hard:
            self.held_micros += grant.micros
            paid = pricing.affordable_tokens(self.plan.rates, self.num_prompt_tokens, self.held_micros)
        self.covered = tokens if paid is None else min(tokens, paid)

    @property
    def num_granted(self) -> int:
        return sum([tokens for _, tokens in self.grants])

    def settlement(self, num_used: int) -> tuple[list[tuple[int, int]], int]:
        """What it gives back of each grant, the last one first, and what it used beyond them."""
        excess = self.num_granted - num_used
        if not self.grants or excess <= 0:
            return [], -excess
        unused = []
        for at_ms, tokens in reversed(self.grants):
            unused.append((at_ms, min(tokens, excess)))
            excess -= tokens
            if excess <= 0:
                break
        return unused, 0


class Meter:
    """Every gauge, by its rule's name."""

    def __init__(self, completion_estimate: int, starts_at: int, prices: PriceList) -> None:
        """``starts_at``: Unix seconds of instant 0. ``prices``: as they are at the end of time."""
        self._prices = prices
        self._estimate = completion_estimate
        self._starts_at = starts_at
        self._gauges: dict[str, Gauge] = {}
        self._plans: dict[tuple[str, str, str, str], Plan] = {}
        self._open: dict[str, Ticket] = {}

    def admit(
        self,
        policy: Policy,
        names: tuple[str, str, str, str],
        purse_id: str,
        request_id: str,
        num_prompt_tokens: int,
        max_completion_tokens: int,
        now: float,
    ) -> Ticket | Reason:
        """``names``: tenant, key, model and class. ``purse_id``: as a ``NarrowedKey`` has it."""
        plan = self._plan(policy, names, purse_id, now)
        ticket = Ticket(plan, request_id, num_prompt_tokens, max_completion_tokens)
        if num_prompt_tokens + 1 > plan.max_tokens:
            return "tokens"
        chunk = min(self._estimate, max_completion_tokens)
        most = num_prompt_tokens + chunk
        taken = self._take(
            plan.rules,
            Ask(
                request_id,
                min(most, plan.max_tokens),
                most,
                self._worst(plan, num_prompt_tokens, 1),
                self._worst(plan, num_prompt_tokens, chunk),
            ),
            now,
        )
        if isinstance(taken, Refusal):
            return _reason(plan.rules[taken.rule])
        ticket.note(taken)
        self._open[request_id] = ticket
        return ticket

    def top_up(self, ticket: Ticket, num_completion_tokens: int, now: float) -> bool:
        """Sets aside what so many lack, and more if there is room; False where a ceiling or the budget is reached."""
        if num_completion_tokens <= ticket.covered:
            return True
        plan, num_prompt = ticket.plan, ticket.num_prompt_tokens
        ahead = max(num_completion_tokens, min(ticket.covered + self._estimate, ticket.max_completion_tokens))
        has_tokens = plan.max_tokens != NO_CEILING
        num_held = ticket.num_granted - num_prompt if has_tokens else 0
        taken = self._take(
            plan.growing,
            Ask(
                ticket.request_id,
                max(0, num_completion_tokens - num_held) if has_tokens else 0,
                max(0, ahead - num_held) if has_tokens else 0,
                max(0, self._worst(plan, num_prompt, num_completion_tokens) - ticket.held_micros),
                max(0, self._worst(plan, num_prompt, ahead) - ticket.held_micros),
            ),
            now,
        )
        if isinstance(taken, Refusal):
            return False
        ticket.note(taken)
        return True

    def close(self, ticket: Ticket, usage: Usage | None, now: float, engine_us: int = 0) -> int:
        """What it costs, in micro-units; without usage it was never computed, costs nothing and gives all back."""
        plan = ticket.plan
        cost = 0 if usage is None else pricing.cost_micros(plan.rates, usage, "miss", engine_us)
        unused, overused = ticket.settlement(
            0 if usage is None else usage.num_prompt_tokens + usage.num_completion_tokens
        )
        gauges = [self._gauge(rule) for rule in plan.rules]
        admission.settle(plan.rules, gauges, ticket.request_id, unused, overused, cost, _ms(now))
        del self._open[ticket.request_id]
        return cost

    def renew(self, now: float) -> None:
        """What open requests hold, they hold on."""
        now_ms = _ms(now)
        for request_id, ticket in self._open.items():
            for rule in ticket.plan.rules:
                gauge = self._gauges[rule.name]
                leases = gauge.leases if isinstance(gauge, Purse) else gauge
                if isinstance(leases, Leases):
                    leases.renew(request_id, now_ms)

    def _plan(self, policy: Policy, names: tuple[str, str, str, str], purse_id: str, now: float) -> Plan:
        plan = self._plans.get(names)
        unix_s = self._starts_at + now
        if plan is None or any(unix_s >= each.period.ends_at for each in plan.budgets):
            tenant, key, model, sla_class = names
            budgets = admission.running(policy, tenant, key, purse_id or key, unix_s)
            rules = (*admission.rules_for(policy, tenant, key, model), *(each.rule for each in budgets))
            plan = self._plans[names] = Plan(
                rules=rules,
                growing=tuple(rule for rule in rules if rule.kind in ("tokens", "money")),
                rates=pricelist.priced(policy, "", 0, self._prices, model, sla_class, math.inf).rates,
                max_tokens=min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING),
                budgets=budgets,
                is_hard=any(each.budget.hard for each in budgets),
            )
        return plan

    def _take(self, rules: Sequence[Rule], ask: Ask, now: float) -> Grant | Refusal:
        return admission.take(rules, [self._gauge(rule) for rule in rules], ask, _ms(now))

    def _gauge(self, rule: Rule) -> Gauge:
        gauge = self._gauges.get(rule.name)
        if gauge is None:
            gauge = self._gauges[rule.name] = admission.gauge_for(rule)
        return gauge

    @staticmethod
    def _worst(plan: Plan, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """Micro-units; 0 without a budget."""
        if not plan.budgets:
            return 0
        return pricing.worst_case_micros(plan.rates, num_prompt_tokens, num_completion_tokens)


def _ms(now: float) -> int:
    return int(1e3 * now)


def _reason(rule: Rule) -> Reason:
    match rule.kind:
        case "requests" | "tokens":
            return rule.kind
        case "concurrent":
            return "concurrent_requests"
        case "money":
            return "budget"
