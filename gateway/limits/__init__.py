"""Limits: what a tenant, a key, and a tenant on a model may use, held exactly, by one gateway or by several together.

A request enters with a ticket, which sets aside an estimate of what it will use, all ceilings or none; it tops the
ticket up while its answer grows, and gives back on leaving what it did not use. The judgement is
``policies.admission``; here is where the gauges lie (``memory``, ``shared``), what happens without Redis, and what a
client hears (``headers``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from functools import partial

import msgspec

from gateway.auth import Caller
from gateway.background import alongside
from gateway.clock import Clock
from gateway.errors import GatewayError, LimitsUnavailable
from gateway.limits import headers
from gateway.limits.heard import Heard
from gateway.limits.memory import Meters
from gateway.limits.metered import metered
from gateway.limits.plans import Plan, Plans
from gateway.limits.readings import Reading, readings_of
from gateway.limits.shared import SharedMeters
from gateway.limits.ticket import ELSEWHERE, Ticket
from gateway.limits.untold import Untold
from gateway.prices import Prices
from gateway.redis import Redis, RedisAway
from policies import admission, settings
from policies.admission import NO_CEILING, Alert, Ask, Grant, Refusal, Rule, Running
from policies.answers import Outcome
from policies.policy import Policy
from policies.rate import LEASE_MS

__all__ = ["Limits", "Reading", "Ticket", "metered"]

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 1e3 / 4
"""Leases are renewed so often that one or two failures lose none."""


class Limits:
    """The door that tickets are for."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        redis: Redis | None = None,
        prices: Prices | None = None,
        *,
        num_gateways: Callable[[], int] = lambda: 1,
        alert: Callable[[Alert], None] = lambda alert: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``prices``: None: policies name their own, and there are no others. ``num_gateways``: those that may be
        alive, as last heard. ``alert`` takes what is to be told and never waits."""
        self.local = Meters(clock)
        """All gauges of a gateway that is alone; otherwise those that it goes by while Redis is away: with what it let
        in before."""
        self.shared = SharedMeters(redis) if redis is not None else None
        self._untold = Untold(clock)
        """Of those, what Redis is to hear of when it is back."""
        self.plans = Plans(prices, wall)
        self._wall = wall
        self.open_tickets: dict[str, Ticket] = {}
        """By request id; those that hold something."""
        self._estimate = config.limits.completion_estimate
        self._currency = config.billing.currency
        self._retry_s = config.redis.retry_s
        self._clock = clock
        self._num_gateways = num_gateways
        self._alert = alert
        self._heard = Heard(self.local)
        self.periods: Mapping[str, Set[tuple[str, str]]] = {}
        """By tenant, and by key: purses of budgets that count its requests, and how long their periods are, as
        ``Budgets`` last saw them."""
        self.late: set[str] = set()
        """Purses whose gauge may lack, of what the ledger has, a request that was let in before there was such a
        budget."""
        self.refused: set[Running] = set()
        """Budgets that have refused a request as spent since ``Budgets`` last looked."""

    def admit(
        self,
        caller: Caller,
        model: str,
        num_prompt_tokens: int,
        max_completion_tokens: int,
        request_id: str,
        num_sequences: int = 1,
        outcome: Outcome = "miss",
        sla_class: str = "standard",
    ) -> Ticket:
        """A ticket to be entered. The tokens are of all the request's prompts and sequences together, ``sla_class`` is
        the one that serves it.

        ``outcome``: what the cache has for it. An answer from there counts as a request and takes no tokens. A kept one
        ("hit") has exactly ``max_completion_tokens``, so its whole price is set aside or it is refused; one that is
        still being computed ("shared") has its money set aside like any other, since whoever reads along may become
        the one who pays.

        Entering raises RateLimited, BudgetSpent or LimitsUnavailable.
        """
        plan = self.plans.find(caller, model, sla_class)
        chunk = self._estimate * num_sequences
        return Ticket(
            self,
            plan,
            caller,
            request_id,
            num_prompt_tokens,
            max_completion_tokens,
            chunk,
            outcome,
        )

    async def peek(
        self, policy: Policy, tenant_id: str, key_id: str = "", models: Sequence[str] = (), purse_id: str = ""
    ) -> list[Reading]:
        """How the tenant's ceilings stand: its own and its budget, the key's if one is named, those on each of
        ``models``. ``purse_id``: as a ``Caller`` has it. Raises LimitsUnavailable."""
        named, budgets = self.plans.spelled(policy, tenant_id, key_id, purse_id, models)
        try:
            told = await self.readings([rule for rule, _ in named])
        except RedisAway:
            raise self._unavailable() from None
        return readings_of(named, budgets, told, self._wall())

    def known(self, policy: Policy, tenant_id: str) -> list[Reading]:
        """The tenant's own ceilings and its budget, as far as they are in this gateway's memory: all that a gateway
        has that counts alone, and of what lies in Redis the budget, as last heard of."""
        named, budgets = self.plans.spelled(policy, tenant_id, "", "", ())
        if self.shared is None:
            return readings_of(named, budgets, self.local.readings([rule for rule, _ in named]), self._wall())
        heard = [each for each in budgets if self._heard.has(each)]
        told = [number for each in heard for number in (self._heard.spent(each), 0)]
        return readings_of([(each.rule, "") for each in heard], heard, told, self._wall())

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, open requests keep their leases. On leaving, settlements arrive where they go."""
        try:
            async with alongside(self._renew_forever()):
                yield
        finally:
            if self.shared is not None:
                await self.shared.close()

    async def restore(self, of: Running, spent_micros: int) -> None:
        """At least so much of this budget is spent, as the ledger knows. Raises RedisAway."""
        if self.shared is None:
            self.local.restore(of.rule, spent_micros)
            return
        self._heard.hear(of, spent_micros)
        await self.shared.restore(of.rule, spent_micros)
        self._heard.forget_here(of)  # what this gateway spent by itself is in the ledger

    async def look(self) -> None:
        """Whether Redis is back, which hears then what has been let in without it. Raises RedisAway."""
        if self.shared is None:
            return
        await self.shared.look()
        await self._untold.tell(self.shared, self.open_tickets)

    # For tickets

    async def take(
        self, plan: Plan, ask: Ask, least_useful: int, sees_all: bool
    ) -> tuple[Grant, tuple[Rule, ...], Meters | SharedMeters, list[int] | None]:
        """The grant, the rules by which and the gauges in which, and their readings if they are another machine's.

        ``least_useful``: tokens below which there is no point in letting it in. ``sees_all``: whoever asks may know
        what the whole tenant spends. Raises what clients hear.
        """
        rules = plan.rules
        if self.shared is None:
            return self._take_here(plan, rules, ask, sees_all), rules, self.local, None
        try:
            outcome, readings = await self._take_together(plan, rules, rules, ask)
        except RedisAway:
            rules = self._divided(plan, rules)
            most = min((rule.ceiling for rule in rules if rule.kind == "tokens"), default=NO_CEILING)
            if least_useful > most:
                raise self._unavailable() from None
            ask = msgspec.structs.replace(ask, least_tokens=min(ask.least_tokens, most))
            return self._take_here(plan, rules, ask, sees_all), rules, self.local, None
        if isinstance(outcome, Grant):
            return self._noted(rules, ask, outcome), rules, self.shared, readings
        raise self._refused(plan, rules, ask, outcome, readings, sees_all)

    async def grow(self, plan: Plan, ask: Ask, meters: Meters | SharedMeters) -> Grant | None:
        """More for an answer that is being written; None: there is no more. Raises LimitsUnavailable."""
        if isinstance(meters, SharedMeters):
            try:
                # The money goes with the rest when the ticket is left; the tokens it would not know of.
                outcome, _ = await self._take_together(
                    plan, plan.growing, [rule for rule in plan.growing if rule.kind == "tokens"], ask
                )
                if isinstance(outcome, Grant):
                    outcome = self._noted(plan.growing, ask, outcome)
            except RedisAway:
                outcome = self.local.take(self._divided(plan, plan.growing), ask)
                if isinstance(outcome, Grant):
                    self._untold.count(plan.growing, outcome)
                    outcome = msgspec.structs.replace(outcome, at_ms=ELSEWHERE, noted_at_ms=outcome.at_ms)
        else:
            rules = plan.growing if self.shared is None else self._divided(plan, plan.growing)
            outcome = meters.take(rules, ask)
            if self.shared is not None and isinstance(outcome, Grant):
                self._untold.count(rules, outcome)
        return outcome if isinstance(outcome, Grant) else None

    def settle(
        self,
        plan: Plan,
        meters: Meters | SharedMeters,
        rules: Sequence[Rule],
        request_id: str,
        unused: Sequence[tuple[Grant, int]],
        overused: int,
        cost_micros: int,
    ) -> None:
        """Gives back, of each grant so many tokens, and charges. Never waits."""
        budgets, known = plan.budgets, self._all_known(plan)
        there = [(grant.at_ms, tokens) for grant, tokens in unused]

        def told(spent: list[int]) -> None:
            for each, micros in zip(budgets, spent, strict=True):
                self._heard.hear(each, micros)
                self._spent(each, micros, cost_micros)
                if meters is self.local:
                    self._heard.forget_here(each)  # as ``restore`` does

        def lost() -> None:
            for each in budgets:
                self._heard.add(each, cost_micros, meters is self.local)

        if isinstance(meters, SharedMeters):
            meters.settle_soon(rules, request_id, there, overused, cost_micros, told, lost, known)
            here = [(grant.noted_at_ms, tokens) for grant, tokens in unused]
            self.local.settle(_without_money(rules), request_id, here, overused, 0)
            if alone := [(grant.noted_at_ms, tokens) for grant, tokens in unused if grant.at_ms == ELSEWHERE]:
                self._untold.settled(rules, request_id, alone, 0)
            return
        spent = meters.settle(rules, request_id, there, overused, cost_micros)
        for each, micros, others_micros in zip(budgets, spent, known, strict=True):
            self._spent(each, micros + others_micros, cost_micros)
        if self.shared is None:
            return
        if self._untold.settled(rules, request_id, there, overused) or (budgets and cost_micros):
            # Redis may be back, and know already all that the ledger had until then.
            held = [rule for rule in rules if not rule.slot_ms]
            self.shared.settle_soon(held, request_id, [], 0, cost_micros, told, lost, known)

    def has_cost(self, plan: Plan, tenant_id: str, key_id: str) -> None:
        """A request has, and its row is written; by now its tenant, its key, or one that this was rotated into, may
        have a budget that it was not let in by."""
        for owner in (tenant_id, key_id):
            if (counting := self.periods.get(owner)) is not None:
                known = {(each.purse_id, each.budget.period) for each in plan.budgets}
                self.late.update(purse_id for purse_id, _ in counting - known)

    async def readings(self, rules: Sequence[Rule]) -> list[int]:
        """As ``admission.readings``. Raises RedisAway."""
        return self.local.readings(rules) if self.shared is None else await self.shared.readings(rules)

    # Within

    async def _take_together(
        self, plan: Plan, rules: Sequence[Rule], undo: Sequence[Rule], ask: Ask
    ) -> tuple[Grant | Refusal, list[int]]:
        """Raises RedisAway. What is granted after its request has gone away is given back under the rules ``undo``."""
        assert self.shared is not None
        taking = asyncio.get_running_loop().create_task(self.shared.take(rules, ask, known=self._all_known(plan)))
        try:
            return await asyncio.shield(taking)
        except RedisAway:
            self.shared.left(undo, ask.request_id)
            raise
        except asyncio.CancelledError:
            taking.add_done_callback(partial(self._give_back, undo, ask))
            raise

    def _noted(self, rules: Sequence[Rule], ask: Ask, grant: Grant) -> Grant:
        """What Redis grants to this gateway counts in its part of the limits as well, should Redis go away; of money it
        is heard what all have spent."""
        return self.local.note(_without_money(rules), ask.request_id, grant)

    def _give_back(
        self, rules: Sequence[Rule], ask: Ask, taking: asyncio.Task[tuple[Grant | Refusal, list[int]]]
    ) -> None:
        if taking.cancelled() or self.shared is None:
            return
        if (error := taking.exception()) is not None:
            if isinstance(error, RedisAway):
                self.shared.left(rules, ask.request_id)
            return
        grant, _ = taking.result()
        if isinstance(grant, Grant):
            self.shared.settle_soon(rules, ask.request_id, [(grant.at_ms, grant.tokens)], 0, 0, lambda spent: None)

    def _take_here(self, plan: Plan, rules: Sequence[Rule], ask: Ask, sees_all: bool) -> Grant:
        outcome = self.local.take(rules, ask)
        if isinstance(outcome, Grant):
            if self.shared is not None:
                self._untold.count(rules, outcome)
            return outcome
        raise self._refused(plan, rules, ask, outcome, self.local.readings(rules), sees_all)

    def _refused(
        self, plan: Plan, rules: Sequence[Rule], ask: Ask, refusal: Refusal, readings: Sequence[int], sees_all: bool
    ) -> GatewayError:
        if rules[refusal.rule].kind != "money":
            return headers.refused(rules, ask, refusal, readings, None)
        of = plan.budgets[refusal.rule - len(rules)]
        total, reserved = readings[2 * refusal.rule : 2 * refusal.rule + 2]
        spent, is_divided = total - reserved, rules is not plan.rules
        if is_divided:
            spent += self._heard.before(of)
            reserved += self._held_together(of)
        if not refusal.wait_ms:
            # A part of the money, as without Redis, may be spent while the whole is not.
            if not is_divided or spent + ask.least_micros > of.rule.ceiling:
                self.refused.add(of)
            else:
                refusal = msgspec.structs.replace(refusal, wait_ms=admission.BUSY_RETRY_MS)
        reset_ms = max(0, int(1e3 * (of.period.ends_at - self._wall())))
        is_shown = sees_all or of.key_id != ""
        money = headers.Money(of, spent, reserved, reset_ms, self._currency, is_shown)
        return headers.refused(rules, ask, refusal, readings, money)

    def _divided(self, plan: Plan, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """Without Redis, by the policy's choice. Raises LimitsUnavailable."""
        if plan.policy.without_redis == "refuse":
            raise self._unavailable()
        num_gateways = max(1, self._num_gateways())
        parts = [admission.divided(rule, num_gateways, 0) for rule in rules if rule.kind != "money"]
        for each in plan.budgets:
            before = self._heard.before(each)
            parts.append(admission.divided(each.rule, num_gateways, before, self._held_together(each)))
        return tuple(parts)

    def _held_together(self, of: Running) -> int:
        return sum(ticket.held_together(of.rule) for ticket in self.open_tickets.values()) if of.budget.hard else 0

    def _unavailable(self) -> LimitsUnavailable:
        return LimitsUnavailable(
            "The limits of this project cannot be checked at the moment. Please try again.",
            retry_after_s=self._retry_s,
        )

    def _all_known(self, plan: Plan) -> list[int]:
        """Spent of each budget of the plan by all gateways together, as last heard of."""
        return [self._heard.spent(each) for each in plan.budgets]

    def _spent(self, of: Running, spent_micros: int, cost_micros: int) -> None:
        """Each settlement moves the sum by its own cost, so of all gateways exactly one crosses a share."""
        if cost_micros:
            for alert in admission.alerts(of, spent_micros - cost_micros, spent_micros):
                self._alert(alert)

    async def _renew_forever(self) -> None:
        while True:
            slept_at = self._clock.now()
            await self._clock.sleep(RENEW_S)
            try:
                await self.renew(self._clock.now() - slept_at > 2 * RENEW_S)
            except Exception:
                log.exception("the leases of open requests cannot be renewed")

    async def renew(self, has_stood_still: bool = False) -> None:
        """The leases of all open requests, where they lie; some may have ended if this gateway has stood still."""
        leases: dict[tuple[bool, str], tuple[Rule, list[str]]] = {}
        for ticket in self.open_tickets.values():
            for rule, is_shared in ticket.leases():
                leases.setdefault((is_shared, rule.name), (rule, []))[1].append(ticket.request_id)
        calls = []
        for (is_shared, name), (rule, request_ids) in leases.items():
            self.local.renew(name, request_ids)
            if is_shared and self.shared is not None:
                calls.append(self.shared.renew(rule, request_ids))
        if self.shared is not None:
            calls.append(self._untold.hold(self.shared, self.open_tickets, has_stood_still))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, RedisAway):
                raise outcome


def _without_money(rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.kind != "money"]
