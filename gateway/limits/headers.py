"""What a client hears of its limits: headers on every answer, and why it is refused.

``x-ratelimit-*`` are OpenAI's: of all the ceilings on requests (on tokens) that hold for the request, they describe the
one with the least room left, as its gauge stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import BudgetSpent, GatewayError, NeverFits, RequestsLimited, TokensLimited
from policies.admission import Ask, Refusal, Rule, Running

OF = {"tenant": "this project", "key": "this API key", "model": "this project on this model"}
WORDS = {
    "requests_per_minute": "requests per min (RPM)",
    "tokens_per_minute": "tokens per min (TPM)",
    "tokens_per_day": "tokens per day (TPD)",
    "concurrent_requests": "concurrent requests",
}
"""OpenAI's, by which clients tell the limits apart; the numbers behind them they read as well."""


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


def refused(
    rules: Sequence[Rule], ask: Ask, refusal: Refusal, readings: Sequence[int], budget: Running | None
) -> GatewayError:
    """The failure for a request that a rule refuses; ``budget``: whose rule it is, if it is one's."""
    rule = rules[refusal.rule]
    headers = headers_of(rules, readings)
    if budget is not None and refusal.wait_ms:
        return RequestsLimited(
            f"What is left of the budget of {OF[rule.scope]} for the period is set aside for requests that are under "
            f"way. Please try again in {duration(refusal.wait_ms)}.",
            headers=headers,
            retry_after_s=refusal.wait_ms / 1e3,
        )
    if budget is not None:
        return BudgetSpent(
            f"You exceeded your current quota: the budget of {OF[rule.scope]} for the period is spent. Waiting a "
            "moment does not help; ask whoever administers it.",
            headers=headers,
            ends_at=budget.period.ends_at,
        )
    wait_s = refusal.wait_ms / 1e3
    asked = ask.least_tokens if rule.kind == "tokens" else 1
    message = (
        f"Rate limit reached for {OF[rule.scope]} on {WORDS[rule.limit]}: Limit {rule.ceiling}, "
        f"Used {readings[2 * refusal.rule]}, Requested {asked}. Please try again in {duration(refusal.wait_ms)}."
    )
    kind = TokensLimited if rule.kind == "tokens" else RequestsLimited
    return kind(message, headers=headers, retry_after_s=wait_s)


def never(rules: Sequence[Rule], num_tokens: int) -> NeverFits:
    """The failure for a request that would not pass with nothing else in its way."""
    rule = min((rule for rule in rules if rule.kind == "tokens"), key=lambda rule: rule.ceiling)
    return NeverFits(
        f"Request too large for {OF[rule.scope]} on {WORDS[rule.limit]}: Limit {rule.ceiling}, Requested {num_tokens}. "
        "It can never pass; shorten the prompt.",
        headers={},
    )
