"""One request's leave to run: what was set aside for it, and what it gives back."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from gateway.auth import USAGE, Caller
from gateway.limits import headers
from gateway.limits.plans import Plan
from policies import pricing
from policies.admission import NO_CEILING, Ask, Grant, Rule
from policies.answers import Outcome
from policies.pricing import FROM_CACHE, Rates
from policies.terms import Usage

if TYPE_CHECKING:
    from gateway.limits import Limits
    from gateway.limits.memory import Meters
    from gateway.limits.shared import SharedMeters


ELSEWHERE = 0
"""Instant of a grant that the gauges that admitted the request know nothing of; nothing of it is given back there."""


class Ticket:
    """An async context manager: entering it reserves, or raises why not; leaving it gives back whatever was not used.

    A request that leaves without having settled has used nothing but its place among the requests of the minute.
    """

    __slots__ = (
        "_affordable",
        "_caller",
        "_chunk",
        "_cost_micros",
        "_covered",
        "_grants",
        "_held_here",
        "_held_micros",
        "_limits",
        "_max_completion_tokens",
        "_meters",
        "_num_prompt_tokens",
        "_outcome",
        "_plan",
        "_readings",
        "_rules",
        "_tokens",
        "_used",
        "request_id",
    )

    def __init__(
        self,
        limits: Limits,
        plan: Plan,
        caller: Caller,
        request_id: str,
        num_prompt_tokens: int,
        max_completion_tokens: int,
        chunk: int,
        outcome: Outcome,
    ) -> None:
        self.request_id = request_id
        self._limits = limits
        self._plan = plan
        self._caller = caller
        """Of whom a plan without rules says nothing."""
        self._rules: tuple[Rule, ...] = plan.rules
        """Those it was let in by."""
        self._meters: Meters | SharedMeters | None = None
        """Where they are counted; None until it is let in, and where there are none."""
        self._num_prompt_tokens = num_prompt_tokens
        self._max_completion_tokens = max_completion_tokens
        self._chunk = chunk
        """Completion tokens that are set aside at a time."""
        self._outcome = outcome
        self._grants: list[Grant] = []
        """Those of tokens."""
        self._tokens = NO_CEILING
        """Completion tokens that ceilings on tokens allow so far."""
        self._affordable = NO_CEILING
        """Completion tokens that the money set aside pays for."""
        self._covered = NO_CEILING
        """The lesser of both."""
        self._held_micros = 0
        self._held_here = 0
        """Of that, what the gauges that admitted the request know nothing of."""
        self._used = 0
        """Tokens, prompt and completion; none before it is settled, or when they came from a cache."""
        self._cost_micros: int | None = None
        self._readings: list[int] | None = None
        """Of the shared gauges when it was let in."""

    async def __aenter__(self) -> Ticket:
        plan, rates = self._plan, self._plan.priced.rates
        if not plan.rules:
            return self
        num_prompt, most = self._num_prompt_tokens, self._max_completion_tokens
        first = min(1, most)
        chunk = min(self._chunk, most)
        least_useful = num_tokens = 0
        if self._outcome not in FROM_CACHE:
            least_useful, num_tokens = num_prompt + first, num_prompt + chunk
            if least_useful > plan.max_tokens:
                raise headers.never(plan.rules, least_useful)
        least_micros = most_micros = 0
        if plan.is_hard:
            if self._outcome == "hit":  # nothing about it is an estimate
                least_micros = most_micros = pricing.cost_micros(rates, Usage(num_prompt, 0, most), "hit")
            else:
                least_micros = pricing.worst_case_micros(rates, num_prompt, first)
                most_micros = pricing.worst_case_micros(rates, num_prompt, chunk)
        # Where even a whole window does not hold the estimate, the request is let in with the whole window.
        least_tokens = num_tokens if num_tokens < plan.max_tokens else plan.max_tokens
        ask = Ask(self.request_id, least_tokens, num_tokens, least_micros, most_micros)
        sees_all = self._caller.may(USAGE)
        taken = await self._limits.take(plan, ask, least_useful, sees_all)
        grant, self._rules, self._meters, self._readings = taken
        self._limits.open_tickets[self.request_id] = self
        self._note(grant)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cost_micros:
            self._limits.has_cost(self._plan, self._caller.tenant_id, self._caller.key_id)
        if self._meters is None:
            return
        del self._limits.open_tickets[self.request_id]
        excess = sum([grant.tokens for grant in self._grants]) - self._used
        overused = max(0, -excess)
        unused = []
        for grant in reversed(self._grants):  # what came last was needed least
            if excess <= 0:
                break
            unused.append((grant, min(grant.tokens, excess)))
            excess -= grant.tokens
        self._limits.settle(self._plan, self._meters, self._rules, self.request_id, unused, overused, self.cost_micros)

    @property
    def rates(self) -> Rates | None:
        """By which it is settled; None where nothing costs anything."""
        return None if self._plan.priced.is_free else self._plan.priced.rates

    @property
    def cost_micros(self) -> int:
        """What it was settled for."""
        return self._cost_micros or 0

    @property
    def num_covered(self) -> int:
        """Completion tokens, of all its sequences together, that are set aside."""
        return self._covered

    @property
    def num_paid(self) -> int:
        """Completion tokens that the money set aside pays for, wherever they come from."""
        return self._affordable

    def covers(self, num_completion_tokens: int) -> bool:
        """Whether so many, of all its sequences together, are set aside; if not, ``top_up``."""
        return num_completion_tokens <= self._covered

    async def top_up(self, num_completion_tokens: int, is_from_cache: bool = False) -> bool:
        """Sets aside what an answer of so many tokens lacks, and some more if there is room. False: a ceiling or the
        budget is reached, and the answer ends with the tokens that are covered.

        ``is_from_cache``: by now it needs money alone, and ends with the tokens that are paid for. Raises
        LimitsUnavailable as admission does.
        """
        covered = self._affordable if is_from_cache else self._covered
        if num_completion_tokens <= covered:
            return True
        plan, rates, num_prompt = self._plan, self._plan.priced.rates, self._num_prompt_tokens
        ahead = max(num_completion_tokens, min(covered + self._chunk, self._max_completion_tokens))
        least_micros = most_micros = 0
        if plan.is_hard:
            worst = pricing.worst_case_micros
            least_micros = max(0, worst(rates, num_prompt, num_completion_tokens) - self._held_micros)
            most_micros = max(0, worst(rates, num_prompt, ahead) - self._held_micros)
        least_tokens = most_tokens = 0
        if not is_from_cache:
            least_tokens, most_tokens = max(0, num_completion_tokens - self._tokens), max(0, ahead - self._tokens)
        ask = Ask(self.request_id, least_tokens, most_tokens, least_micros, most_micros)
        assert self._meters is not None, "a ticket covers nothing before it is entered"
        grant = await self._limits.grow(plan, ask, self._meters)
        if grant is None:
            return False
        self._note(grant)
        return True

    @property
    def price_version(self) -> str:
        """Where the price came from that counts for it, whatever comes into force meanwhile."""
        return self._plan.priced.version

    def settle(self, usage: Usage, cache_outcome: str = "miss", engine_us: int = 0) -> int:
        """What the request costs, in micro-units; the first call counts. ``usage`` is what was delivered. Answers that
        came from a cache use no tokens of a ceiling. The rest is given back on leaving."""
        if self._cost_micros is None:
            price = self._plan.priced
            self._cost_micros = (
                0 if price.is_free else pricing.cost_micros(price.rates, usage, cache_outcome, engine_us)
            )
            if cache_outcome not in FROM_CACHE:
                self._used = usage.num_prompt_tokens + usage.num_completion_tokens
        return self._cost_micros

    def headers(self) -> dict[str, str]:
        """``x-ratelimit-*``; none where nothing limits requests or tokens."""
        if self._meters is None:
            return {}
        readings = self._readings
        if readings is None:
            readings = self._limits.local.readings(self._rules)
        return headers.headers_of(self._rules, readings)

    @property
    def is_shared(self) -> bool:
        """Whether the gauges that admitted it are shared."""
        return self._meters is not self._limits.local

    def leases(self) -> list[tuple[Rule, bool]]:
        """The rules under which it holds something for as long as it is open, and whether they are shared ones."""
        return [(rule, self.is_shared) for rule in self._rules if rule.kind in ("concurrent", "money")]

    def held(self) -> list[tuple[Rule, int]]:
        """The same with the money, in micro-units; 0 for a place. A soft budget has none set aside."""
        leases = [rule for rule, _ in self.leases() if rule.ceiling != NO_CEILING]
        return [(rule, self._held_micros if rule.kind == "money" else 0) for rule in leases]

    def held_together(self, rule: Rule) -> int:
        """The money of this budget that it holds in gauges that are shared, in micro-units."""
        is_shared = self._meters is not None and self.is_shared
        is_held = any(each.budget.hard and each.rule.name == rule.name for each in self._plan.budgets)
        return self._held_micros - self._held_here if is_shared and is_held else 0

    def _note(self, grant: Grant) -> None:
        plan = self._plan
        if self._outcome == "hit":
            return
        if plan.max_tokens != NO_CEILING:
            if not self._grants:
                self._tokens = -self._num_prompt_tokens
            self._tokens += grant.tokens
            self._grants.append(grant)
            self._covered = self._tokens
        if plan.is_hard:
            self._held_micros += grant.micros
            if grant.at_ms == ELSEWHERE:
                self._held_here += grant.micros
            paid = pricing.affordable_tokens(plan.priced.rates, self._num_prompt_tokens, self._held_micros)
            self._affordable = NO_CEILING if paid is None else paid
            self._covered = min(self._tokens, self._affordable)
