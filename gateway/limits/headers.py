"""What a client hears of its limits: headers on every answer, and why it is refused.

``x-ratelimit-*`` are OpenAI's: of all the ceilings on requests (on tokens) that hold for the request, they describe the
one with the least room left, as its gauge stands. Who is refused by a budget is told in the same way how that stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.errors import BudgetSpent, GatewayError, NeverFits, RequestsLimited, TokensLimited
from policies import pricing
from policies.admission import Ask, Refusal, Rule, Running

OF = {"tenant": "this project", "key": "this API key", "model": "this project on this model"}
WORDS = {
    "requests_per_minute": "requests per min (RPM)",
    "tokens_per_minute": "tokens per min (TPM)",
    "tokens_per_day": "tokens per day (TPD)",
    "concurrent_requests": "concurrent requests",
}
"""OpenAI's, by which clients tell the limits apart; the numbers behind them they read as well."""


class Money(msgspec.Struct, frozen=True):
    """How the budget stands that refuses a request, in millionths of ``currency``."""

    of: Running
    spent: int
    reserved: int
    """Set aside for requests that are under way."""
    reset_ms: int
    """Until the next period begins."""
    currency: str
    is_shown: bool
    """Whether its key may know all this."""

    def words(self, ask: Ask) -> str:
        """As the other limits have it; none where that is not for this key."""
        if not self.is_shown:
            return ""
        told = (
            ("Limit", self.limit),
            ("Spent", self.spent),
            ("Reserved", self.reserved),
            ("Requested", ask.least_micros),
        )
        return ": " + ", ".join(f"{what} {amount(micros)} {self.currency}" for what, micros in told)

    def headers(self) -> dict[str, str]:
        """``x-ratelimit-*-budget``, likewise."""
        if not self.is_shown:
            return {}
        return {
            "x-ratelimit-limit-budget": amount(self.limit),
            "x-ratelimit-spent-budget": amount(self.spent),
            "x-ratelimit-reserved-budget": amount(self.reserved),
            "x-ratelimit-remaining-budget": amount(max(0, self.limit - self.spent - self.reserved)),
            "x-ratelimit-reset-budget": duration(self.reset_ms),
        }

    @property
    def limit(self) -> int:
        """All of it."""
        return pricing.budget_micros(self.of.budget.amount)


def headers_of(rules: Sequence[Rule], readings: Sequence[int]) -> dict[str, str]:
    """``readings``: for each rule what its gauge has, and the milliseconds until it is empty."""
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens"):
        tightest: tuple[int, int, int] | None = None
        for index, rule in enumerate(rules):
            if rule.kind == kind:
                room = max(rule.ceiling - readings[2 * index], 0)
                if tightest is None or room < tightest[0]:
                    tightest = (room, rule.ceiling, readings[2 * index + 1])
        if tightest is not None:
            room, ceiling, reset_ms = tightest
            headers[f"x-ratelimit-limit-{kind}"] = str(ceiling)
            headers[f"x-ratelimit-remaining-{kind}"] = str(room)
            headers[f"x-ratelimit-reset-{kind}"] = duration(reset_ms)
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes it: "12ms", "1.5s", "6m0s", "23h59m0s"."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def amount(micros: int) -> str:
    """In units of the currency, with at least two digits after the point and no more than it needs."""
    whole, rest = divmod(micros, 1_000_000)
    digits = f"{rest:06}".rstrip("0")
    return f"{whole}.{digits:0<2}"


def refused(
    rules: Sequence[Rule], ask: Ask, refusal: Refusal, readings: Sequence[int], money: Money | None
) -> GatewayError:
    """The failure for a request that a rule refuses; ``money``: how the budget stands whose rule it is, if it is
    one's."""
    rule = rules[refusal.rule]
    headers = headers_of(rules, readings)
    if money is not None:
        return _refused_by_budget(f"the budget of {OF[rule.scope]} for the period", ask, refusal, headers, money)
    wait_s = refusal.wait_ms / 1e3
    asked = ask.least_tokens if rule.kind == "tokens" else 1
    message = (
        f"Rate limit reached for {OF[rule.scope]} on {WORDS[rule.limit]}: Limit {rule.ceiling}, "
        f"Used {readings[2 * refusal.rule]}, Requested {asked}. Please try again in {duration(refusal.wait_ms)}."
    )
    kind = TokensLimited if rule.kind == "tokens" else RequestsLimited
    return kind(message, headers=headers, retry_after_s=wait_s)


def _refused_by_budget(budget: str, ask: Ask, refusal: Refusal, headers: dict[str, str], money: Money) -> GatewayError:
    headers = headers | money.headers()
    if refusal.wait_ms:
        what = f"What is left of {budget} is set aside for requests that are under way"
        do = f"Please try again in {duration(refusal.wait_ms)}."
        return RequestsLimited(
            f"{what}{money.words(ask)}. {do}",
            headers=headers,
            retry_after_s=refusal.wait_ms / 1e3,
            kept=f"{what}. {do}",
        )
    what = f"You exceeded your current quota: {budget} is spent"
    do = "Waiting a moment does not help; ask whoever administers it."
    return BudgetSpent(
        f"{what}{money.words(ask)}. {do}", headers=headers, ends_at=money.of.period.ends_at, kept=f"{what}. {do}"
    )


def never(rules: Sequence[Rule], num_tokens: int) -> NeverFits:
    """The failure for a request that would not pass with nothing else in its way."""
    rule = min((rule for rule in rules if rule.kind == "tokens"), key=lambda rule: rule.ceiling)
    return NeverFits(
        f"Request too large for {OF[rule.scope]} on {WORDS[rule.limit]}: Limit {rule.ceiling}, Requested {num_tokens}. "
        "It can never pass; shorten the prompt.",
        headers={},
    )
