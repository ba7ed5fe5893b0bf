"""Lets a request in, or says which ceiling is in its way and when to come back.

``rules_for`` spells a policy out into rules, each a ceiling on one gauge; ``take`` holds a request against all of them
and either adds it to every gauge or changes none. A request reserves what it may use and gives back what it did not.
The Redis script of the gateway's shared limits is the same function over the same gauges; a test holds them together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from policies import pricing
from policies.policy import Budget, Limits, Policy
from policies.rate import DAY_MS, LEASE_MS, MINUTE_MS, NUM_SLOTS, Gauge, Leases, Purse, Window

Kind = Literal["requests", "tokens", "concurrent", "money"]
Scope = Literal["tenant", "key", "model"]

BUSY_RETRY_MS = 1000
"""When to come back for what open requests hold, a place or money: when some of it is free nobody knows."""
NO_CEILING = 1 << 53
"""More than is ever counted."""


class Rule(msgspec.Struct, frozen=True, gc=False):
    """One ceiling on one gauge."""

    name: str
    """Of the gauge, unlike every other one's. The tenant stands in braces, so that a Redis cluster keeps all that one
    request touches in one place."""
    kind: Kind
    ceiling: int
    """Requests, tokens, open requests or micro-units."""
    keep_ms: int
    """How long the gauge means something after its last change."""
    slot_ms: int = 0
    """Of a window."""
    scope: Scope = "tenant"
    limit: str = ""
    """The policy's word for it, such as ``tokens_per_minute``."""


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a request wants set aside. It is let in with ``least`` and gets as much of ``most`` as there is room for."""

    request_id: str
    least_tokens: int
    most_tokens: int
    least_micros: int = 0
    most_micros: int = 0


class Grant(msgspec.Struct, frozen=True, gc=False):
    """It is in, with so much set aside."""

    at_ms: int
    tokens: int
    micros: int = 0
    noted_at_ms: int = 0
    """Where the gauges are shared: when the gateway that asked noted it among its own."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """It is not, and no gauge has changed."""

    at_ms: int
    rule: int
    """Index of the one that takes longest; money that is spent before all others, because waiting does not help."""
    wait_ms: int
    """If nobody else comes, it is let in after that; 0 where the money is spent."""


def rules_for(policy: Policy, tenant_id: str, key_id: str, model: str) -> tuple[Rule, ...]:
    """Everything but the budget that a request of this key on this model is held against."""
    return named(rules_on(policy, model), tenant_id, key_id)


def rules_on(policy: Policy, model: str) -> tuple[Rule, ...]:
    """The same for whichever tenant and key; ``named`` completes their names."""
    return (
        *_rules_of(policy.limits, "tenant", ""),
        *_rules_of(policy.key_limits, "key", ""),
        *_rules_of(policy.limits_on(model), "model", f"model:{model}"),
    )


def named(rules: Sequence[Rule], tenant_id: str, key_id: str) -> tuple[Rule, ...]:
    """The rules as this key of this tenant has them."""
    tenant = f"{{{tenant_id}}}"
    key = f"{tenant}key:{key_id}"
    return tuple(
        [
            Rule(
                (key if rule.scope == "key" else tenant) + rule.name,
                rule.kind,
                rule.ceiling,
                rule.keep_ms,
                rule.slot_ms,
                rule.scope,
                rule.limit,
            )
            for rule in rules
        ]
    )


def _rules_of(limits: Limits, scope: Scope, name: str) -> list[Rule]:
    kinds: tuple[tuple[str, Kind, int], ...] = (
        ("requests_per_minute", "requests", MINUTE_MS // NUM_SLOTS),
        ("tokens_per_minute", "tokens", MINUTE_MS // NUM_SLOTS),
        ("tokens_per_day", "tokens", DAY_MS // NUM_SLOTS),
        ("concurrent_requests", "concurrent", 0),
    )
    return [
        Rule(f"{name}:{limit}", kind, ceiling, (NUM_SLOTS + 1) * slot_ms or LEASE_MS, slot_ms, scope, limit)
        for limit, kind, slot_ms in kinds
        if (ceiling := getattr(limits, limit)) is not None
    ]


def divided(rule: Rule, num_gateways: int, spent_micros: int, held_micros: int = 0) -> Rule:
    """One gateway's part of a ceiling while the gateways cannot count together: of money, a part of what was left when
    they last could, less what its own requests hold of that; of everything else at least 1, which is held against what
    it let in itself, then and since."""
    if rule.kind == "money":
        if rule.ceiling == NO_CEILING:
            return rule
        left = max(0, rule.ceiling - spent_micros)
        return msgspec.structs.replace(rule, ceiling=max(0, left // num_gateways - held_micros))
    return msgspec.structs.replace(rule, ceiling=max(1, rule.ceiling // num_gateways))


def gauge_for(rule: Rule) -> Gauge:
    """An empty one."""
    match rule.kind:
        case "concurrent":
            return Leases()
        case "money":
            return Purse()
        case _:
            return Window(rule.slot_ms)


def take(rules: Sequence[Rule], gauges: Sequence[Gauge], ask: Ask, now_ms: int) -> Grant | Refusal:
    """All of it or nothing. ``gauges[i]`` is that of ``rules[i]``."""
    tokens, micros = ask.most_tokens, ask.most_micros
    for rule, gauge in zip(rules, gauges, strict=True):
        room = rule.ceiling - gauge.total_at(now_ms)
        if room < 0:  # the ceiling came down, or an answer was longer than what was set aside for it
            room = 0
        kind = rule.kind
        if kind == "tokens":
            if room < tokens:
                if room < ask.least_tokens:
                    return _refused(rules, gauges, ask, now_ms)
                tokens = room
        elif kind == "money":
            if room < micros:
                if room < ask.least_micros:
                    return _refused(rules, gauges, ask, now_ms)
                micros = room
        elif room < 1:
            return _refused(rules, gauges, ask, now_ms)
    grant = Grant(now_ms, tokens, micros)
    note(rules, gauges, ask.request_id, grant, now_ms)
    return grant


def note(rules: Sequence[Rule], gauges: Sequence[Gauge], request_id: str, grant: Grant, now_ms: int) -> None:
    """Counts what was granted, whether or not there is room."""
    for rule, gauge in zip(rules, gauges, strict=True):
        if isinstance(gauge, Window):
            gauge.add(grant.tokens if rule.kind == "tokens" else 1, now_ms)
        elif isinstance(gauge, Leases):
            gauge.hold(request_id, 1, now_ms)
        elif rule.ceiling != NO_CEILING:
            gauge.leases.hold(request_id, grant.micros, now_ms)


def settle(
    rules: Sequence[Rule],
    gauges: Sequence[Gauge],
    request_id: str,
    unused: Sequence[tuple[int, int]],
    overused: int,
    cost_micros: int,
    now_ms: int,
) -> list[int]:
    """The request is over: it gives back ``unused`` tokens, (instant at which they were granted, amount), is charged
    for those it used beyond its grants, and holds nothing more.

    Returns, for each budget among the rules, the money spent in the period by now.
    """
    spent = []
    for rule, gauge in zip(rules, gauges, strict=True):
        if isinstance(gauge, Leases):
            gauge.release(request_id, now_ms)
        elif isinstance(gauge, Purse):
            spent.append(gauge.settle(request_id, cost_micros, now_ms))
        elif rule.kind == "tokens":
            gauge.add(overused, now_ms)
            for at_ms, amount in unused:
                gauge.give_back(amount, at_ms, now_ms)
    return spent


def is_idle(gauge: Gauge, now_ms: int) -> bool:
    """Nothing would change if it were made anew. A purse's money is never forgotten within its period."""
    return not (gauge.leases if isinstance(gauge, Purse) else gauge).total_at(now_ms)


def readings(gauges: Sequence[Gauge], now_ms: int) -> list[int]:
    """What each gauge has, and the milliseconds until a window is empty, or of a purse what is set aside (0 for
    leases): one after the other."""
    told = []
    for gauge in gauges:
        told.append(gauge.total_at(now_ms))
        match gauge:
            case Window():
                told.append(gauge.reset_ms(now_ms))
            case Purse():
                told.append(gauge.leases.total)
            case _:
                told.append(0)
    return told


def _refused(rules: Sequence[Rule], gauges: Sequence[Gauge], ask: Ask, now_ms: int) -> Refusal:
    worst, longest = -1, -1
    for index, (rule, gauge) in enumerate(zip(rules, gauges, strict=True)):
        wait_ms = _wait_ms(rule, gauge, ask, now_ms)
        if wait_ms is None:
            continue
        if isinstance(gauge, Purse) and not wait_ms:
            return Refusal(now_ms, index, 0)
        if wait_ms > longest:
            worst, longest = index, wait_ms
    return Refusal(now_ms, worst, longest)


def _wait_ms(rule: Rule, gauge: Gauge, ask: Ask, now_ms: int) -> int | None:
    """None: this one lets it in."""
    need = {"tokens": ask.least_tokens, "money": ask.least_micros}.get(rule.kind, 1)
    excess = gauge.total_at(now_ms) + need - rule.ceiling
    if not need or excess <= 0:
        return None
    if isinstance(gauge, Window):
        # More than all that counts would have to leave only where the ceiling is below the need, which whoever asks
        # has looked at before.
        return gauge.wait_ms(min(excess, gauge.total), now_ms) if gauge.total else 0
    if isinstance(gauge, Purse) and gauge.spent + need > rule.ceiling:
        return 0
    return BUSY_RETRY_MS


class Period(msgspec.Struct, frozen=True):
    """One day, week or month of a calendar in UTC, in Unix seconds."""

    starts_at: int
    ends_at: int


def period_of(kind: Literal["day", "week", "month"], unix_s: float) -> Period:
    """The one that this instant lies in. Weeks begin on Monday."""
    day = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    match kind:
        case "day":
            start, end = day, day + timedelta(days=1)
        case "week":
            start = day - timedelta(days=day.weekday())
            end = start + timedelta(days=7)
        case "month":
            start = day.replace(day=1)
            end = (start + timedelta(days=31)).replace(day=1)
    return Period(int(start.timestamp()), int(end.timestamp()))


class Running(msgspec.Struct, frozen=True, gc=False):
    """A budget in the period that runs."""

    tenant_id: str
    key_id: str
    """Whose it is; empty: the tenant's."""
    purse_id: str
    """Under which it is counted: the id of the first of the keys that were rotated into this one, or the tenant's."""
    budget: Budget
    period: Period
    rule: Rule

    @classmethod
    def of(cls, budget: Budget, period: Period, tenant_id: str, key_id: str = "", purse_id: str = "") -> Running:
        """The one with its rule."""
        rule = budget_rule(budget, tenant_id, period, purse_id)
        return cls(tenant_id, key_id, purse_id or tenant_id, budget, period, rule)


def running(policy: Policy, tenant_id: str, key_id: str, purse_id: str, unix_s: float) -> tuple[Running, ...]:
    """The budgets that requests of this key are held against, the key's last; without a key the tenant's alone."""
    found: list[Running] = []
    if (budget := policy.budget) is not None:
        found.append(Running.of(budget, period_of(budget.period, unix_s), tenant_id))
    if key_id and (budget := policy.key_budget) is not None:
        found.append(Running.of(budget, period_of(budget.period, unix_s), tenant_id, key_id, purse_id))
    return tuple(found)


def budget_rule(budget: Budget, tenant_id: str, period: Period, purse_id: str = "") -> Rule:
    """A soft budget is counted like a hard one and refuses nothing. The gauge's name has the period's length and
    beginning, so a new period begins with nothing spent. ``purse_id``: of a key's own; empty: it is the tenant's."""
    name = f"budget:{budget.period}:{period.starts_at}"
    name = f"{{{tenant_id}}}key:{purse_id}:{name}" if purse_id else f"{{{tenant_id}}}{name}"
    ceiling = pricing.budget_micros(budget.amount) if budget.hard else NO_CEILING
    keep_ms = 1000 * (period.ends_at - period.starts_at) + DAY_MS
    return Rule(name, "money", ceiling, keep_ms, scope="key" if purse_id else "tenant", limit="budget")


class Alert(msgspec.Struct, frozen=True):
    """A share of a budget has been spent. Told twice it has the same id."""

    id: str
    tenant_id: str
    key_id: str | None
    """Whose own budget it is; None: the tenant's."""
    period: Literal["day", "week", "month"]
    period_starts_at: int
    """Unix seconds."""
    share: float
    amount_micros: int
    spent_micros: int
    hard: bool


def alerts(of: Running, before_micros: int, spent_micros: int, refuses: bool = False) -> list[Alert]:
    """Those for the shares that lie between the two sums. ``refuses``: what is left has been too little for a request;
    a hard budget is spent by then, as it seldom is to its last micro-unit."""
    budget, starts_at = of.budget, of.period.starts_at
    amount = pricing.budget_micros(budget.amount)
    reached = max(spent_micros, amount) if refuses else spent_micros
    crossed = [share for share in sorted(set(budget.alerts_at)) if before_micros < share * amount <= reached]
    told = []
    for share in crossed:
        facts = f"{of.purse_id} {budget.period} {starts_at} {amount} {share!r}"
        alert_id = "evt_" + hashlib.sha256(facts.encode()).hexdigest()[:32]
        key_id = of.key_id or None
        told.append(
            Alert(alert_id, of.tenant_id, key_id, budget.period, starts_at, share, amount, spent_micros, budget.hard)
        )
    return told
