"""Usage to money, in whole micro-units of the currency.

Documents hold exact decimals for a million tokens. Here they become integers, millionths of a micro-unit a token, so
that a sum has no error until it is rounded, once, half to even, to the micro-units of the ledger's row.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import msgspec

from policies.policy import Policy, Price
from policies.terms import Usage

MICRO = 1_000_000
MAX_PRICE = 1_000_000
"""Units of the currency for a million tokens, or for a request."""
MAX_BUDGET = 1_000_000_000
"""Units of the currency; with it all sums stay below 2**53 micro-units, where Redis scripts count exactly."""
NUM_DIGITS = 6
"""After the point."""
FROM_CACHE = ("hit", "shared")
"""Cache outcomes of answers that nothing was computed for: found, or shared with an equal request in flight."""


class Rates(msgspec.Struct, frozen=True, gc=False):
    """One model's price in millionths of a micro-unit: of a token of each kind, and of a request."""

    prompt: int
    cached_prompt: int
    completion: int
    cache_hit: int
    request: int

    @property
    def is_free(self) -> bool:
        return not (self.prompt or self.cached_prompt or self.completion or self.cache_hit or self.request)


def rates_of(price: Price) -> Rates:
    """The price as integers. It must be one that ``check`` finds nothing wrong with."""
    cached = price.prompt if price.cached_prompt is None else price.cached_prompt
    return Rates(
        prompt=_micros(price.prompt),
        cached_prompt=_micros(cached),
        completion=_micros(price.completion),
        cache_hit=_micros(price.cache_hit),
        request=_micros(price.request) * MICRO,
    )


def cost_micros(price: Price | Rates, usage: Usage, cache_outcome: str = "miss") -> int:
    """What a request with this usage costs. ``cache_outcome`` is miss, bypass, hit or shared."""
    rates = price if isinstance(price, Rates) else _known_rates(price)
    num_prompt, num_cached, num_completion = (
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
    )
    cost = rates.request
    if cache_outcome in FROM_CACHE:
        cost += rates.cache_hit * (num_prompt + num_completion)
    else:
        cost += rates.prompt * (num_prompt - num_cached) + rates.cached_prompt * num_cached
        cost += rates.completion * num_completion
    return _half_even(cost)


def worst_case_micros(rates: Rates, num_prompt_tokens: int, num_completion_tokens: int) -> int:
    """At least what so many tokens can cost, wherever they come from."""
    prompt = max(rates.prompt, rates.cached_prompt, rates.cache_hit)
    completion = max(rates.completion, rates.cache_hit)
    return -(-(rates.request + prompt * num_prompt_tokens + completion * num_completion_tokens) // MICRO)


def affordable_tokens(rates: Rates, num_prompt_tokens: int, micros: int) -> int | None:
    """How many completion tokens ``micros`` are enough for beside the prompt, in the worst case; None: any number."""
    completion = max(rates.completion, rates.cache_hit)
    if not completion:
        return None
    prompt = max(rates.prompt, rates.cached_prompt, rates.cache_hit)
    return (micros * MICRO - rates.request - prompt * num_prompt_tokens) // completion


def budget_micros(amount: Decimal) -> int:
    """A budget's amount; ``check`` must find nothing wrong with it."""
    return _micros(amount)


def check(policy: Policy) -> list[str]:
    """The fields, by their path, whose money is negative, has more digits after the point than are counted, or is
    absurdly much; empty when all of it can be used."""
    wrong = [
        f"prices.{model}.{name}"
        for model, price in policy.prices.items()
        for name in Price.__struct_fields__
        if (amount := getattr(price, name)) is not None and not _is_sane(amount, MAX_PRICE)
    ]
    if policy.budget is not None and not _is_sane(policy.budget.amount, MAX_BUDGET):
        wrong.append("budget.amount")
    return wrong


def _is_sane(amount: Decimal, most: int) -> bool:
    if not amount.is_finite() or not 0 <= amount <= most:
        return False
    # By its digits: normalize() would round a long one to the context's precision.
    _, digits, exponent = amount.as_tuple()
    assert isinstance(exponent, int)
    num_beyond = -NUM_DIGITS - exponent
    return num_beyond <= 0 or (num_beyond <= len(digits) and not any(digits[-num_beyond:]))


def _micros(amount: Decimal) -> int:
    numerator, denominator = amount.as_integer_ratio()
    micros, rest = divmod(numerator * MICRO, denominator)
    assert not rest, f"{amount} has more digits than pricing.check lets through"
    return micros


_known_rates = lru_cache(4096)(rates_of)


def _half_even(cost: int) -> int:
    """Millionths of a micro-unit to micro-units."""
    micros, rest = divmod(cost, MICRO)
    return micros + (rest > MICRO // 2 or (rest == MICRO // 2 and micros % 2 == 1))
