"""Usage to money, in whole micro-units of the currency.

Documents hold exact decimals for a million tokens, a request and a second of the engine. Here they become integers,
small enough parts of a micro-unit that even a discounted sum has no error until it is rounded, once, half to even, to
the micro-units of the ledger's row.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from typing import Literal

import msgspec

from policies.policy import Budget, Policy, Price
from policies.terms import Usage

MICRO = 1_000_000
PARTS = 10**10
"""Of a micro-unit, in which rates are counted: six digits of a price, and four of a discount."""
MAX_PRICE = 1_000_000
"""Units of the currency for a million tokens, for a request, or for a second."""
MAX_BUDGET = 1_000_000_000
"""Units of the currency; with it all sums stay below 2**53 micro-units, where Redis scripts count exactly."""
NUM_DIGITS = 6
"""After the point."""
NUM_DISCOUNT_DIGITS = 4
FROM_CACHE = ("hit", "shared")
"""Cache outcomes of answers that nothing was computed for: found, or shared with an equal request in flight."""
UNDISCOUNTED = Decimal(0)

Kind = Literal["prompt", "cached_prompt", "completion", "reasoning", "cache_hit", "request", "engine_second"]
"""What is priced. Prompt tokens are those that were computed, completion tokens those that are no reasoning; an answer
from the exact cache has cache_hit tokens and no others."""


class Rates(msgspec.Struct, frozen=True, gc=False):
    """One model's price in ``PARTS`` of a micro-unit: of a token of each kind, a request, and a microsecond of the
    engine. Field by field in the order of ``Kind``."""

    prompt: int
    cached_prompt: int
    completion: int
    reasoning: int
    cache_hit: int
    request: int
    engine_second: int
    """Of a microsecond; named after what a price names."""

    @property
    def is_free(self) -> bool:
        return not any(msgspec.structs.astuple(self))


def rates_of(price: Price, discount: Decimal = UNDISCOUNTED) -> Rates:
    """The price as integers, less the discount. ``check`` must find nothing wrong with either."""
    left = 10**NUM_DISCOUNT_DIGITS - _whole(discount, NUM_DISCOUNT_DIGITS)
    cached = price.prompt if price.cached_prompt is None else price.cached_prompt
    reasoning = price.completion if price.reasoning is None else price.reasoning
    return Rates(
        prompt=_whole(price.prompt) * left,
        cached_prompt=_whole(cached) * left,
        completion=_whole(price.completion) * left,
        reasoning=_whole(reasoning) * left,
        cache_hit=_whole(price.cache_hit) * left,
        request=_whole(price.request) * left * MICRO,
        engine_second=_whole(price.engine_second) * left,
    )


def cost_micros(price: Price | Rates, usage: Usage, cache_outcome: str = "miss", engine_us: int = 0) -> int:
    """What a request with this usage costs. ``cache_outcome`` is miss, bypass, hit or shared."""
    rates = price if isinstance(price, Rates) else _known_rates(price)
    num_prompt, num_cached, num_completion, num_reasoning = (
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        usage.num_completion_tokens,
        usage.num_reasoning_tokens,
    )
    cost = rates.request
    if cache_outcome in FROM_CACHE:
        cost += rates.cache_hit * (num_prompt + num_completion)
    else:
        cost += rates.prompt * (num_prompt - num_cached) + rates.cached_prompt * num_cached
        cost += rates.completion * (num_completion - num_reasoning) + rates.reasoning * num_reasoning
        cost += rates.engine_second * engine_us
    return _half_even(cost)


def quantities(usage: Usage, cache_outcome: str, engine_us: int, num_requests: int = 1) -> dict[Kind, int]:
    """What is paid for, without what there is none of: tokens, requests, and microseconds of the engine."""
    found: dict[Kind, int]
    if cache_outcome in FROM_CACHE:
        found = {"cache_hit": usage.num_prompt_tokens + usage.num_completion_tokens, "request": num_requests}
    else:
        found = {
            "prompt": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cached_prompt": usage.num_cached_tokens,
            "completion": usage.num_completion_tokens - usage.num_reasoning_tokens,
            "reasoning": usage.num_reasoning_tokens,
            "request": num_requests,
            "engine_second": engine_us,
        }
    return {kind: quantity for kind, quantity in found.items() if quantity}


def parts(
    rates: Rates,
    usage: Usage,
    cache_outcome: str = "miss",
    engine_us: int = 0,
    num_requests: int = 1,
    cost: int | None = None,
) -> dict[Kind, int]:
    """What of the cost is for what, in whole micro-units that add up to it exactly (largest remainder); one for each of
    ``quantities``.

    ``cost``: what was charged, where it is the sum of ``num_requests`` rows, each of which was rounded, or of a
    correction; None: that of one request. What rows were rounded by each kind has its share of; what no rounding
    explains goes to the kind that costs most, or to "request".
    """
    exact: dict[Kind, int] = {
        kind: getattr(rates, kind) * quantity
        for kind, quantity in quantities(usage, cache_outcome, engine_us, num_requests).items()
    }
    total = sum(exact.values())
    if cost is None:
        cost = _half_even(total)
    whole, uneven = _floored(exact, PARTS)
    lacking = cost - sum(whole.values())
    if total and not 0 <= lacking <= len(uneven) and 2 * abs(cost * PARTS - total) <= num_requests * PARTS:
        whole, uneven = _floored({kind: value * cost for kind, value in exact.items()}, total)
        lacking = cost - sum(whole.values())
    for kind in uneven[: max(0, lacking)]:
        whole[kind] += 1
        lacking -= 1
    if lacking:
        most: Kind = max(exact, key=lambda kind: abs(exact[kind])) if any(exact.values()) else "request"
        whole[most] = whole.get(most, 0) + lacking
    return whole


def _floored(shares: dict[Kind, int], divisor: int) -> tuple[dict[Kind, int], list[Kind]]:
    """The shares over the divisor, and those of them that lost something by it, the largest loss first."""
    losses = {kind: value % divisor for kind, value in shares.items()}
    lossy = sorted((kind for kind in shares if losses[kind]), key=lambda kind: -losses[kind])
    return {kind: value // divisor for kind, value in shares.items()}, lossy


def worst_case_micros(rates: Rates, num_prompt_tokens: int, num_completion_tokens: int) -> int:
    """At least what so many tokens can cost, wherever they come from. What the engine's seconds will be nobody knows
    before; where they have a price, each completion token stands for a micro-unit of them, so that what is spent
    already refuses the next request and ends an answer that grows."""
    prompt = max(rates.prompt, rates.cached_prompt, rates.cache_hit)
    completion = _dearest_completion(rates)
    return -(-(rates.request + prompt * num_prompt_tokens + completion * num_completion_tokens) // PARTS)


def affordable_tokens(rates: Rates, num_prompt_tokens: int, micros: int) -> int | None:
    """How many completion tokens ``micros`` are enough for beside the prompt, in the worst case; None: any number."""
    completion = _dearest_completion(rates)
    if not completion:
        return None
    prompt = max(rates.prompt, rates.cached_prompt, rates.cache_hit)
    return (micros * PARTS - rates.request - prompt * num_prompt_tokens) // completion


def _dearest_completion(rates: Rates) -> int:
    return max(rates.completion, rates.reasoning, rates.cache_hit) + (PARTS if rates.engine_second else 0)


def budget_micros(amount: Decimal) -> int:
    """A budget's amount; ``check`` must find nothing wrong with it."""
    return _whole(amount)


def check(policy: Policy) -> dict[str, str]:
    """The fields, by their path, whose money cannot be counted, and what it must be; empty when all of it can."""
    wrong = {
        f"prices.{model}.{name}": message
        for model, price in policy.prices.items()
        for name, message in check_price(price).items()
    }
    for name, discount in (("discount", policy.discount), ("batch_discount", policy.batch_discount)):
        if not _is_sane(discount, 1, NUM_DISCOUNT_DIGITS) or discount == 1:
            wrong[name] = (
                f"must be 0 or more and less than 1, with at most {NUM_DISCOUNT_DIGITS} digits after the point"
            )
    return wrong | check_budget(policy.budget) | check_budget(policy.key_budget, "key_budget")


def check_budget(budget: Budget | None, path: str = "budget") -> dict[str, str]:
    """As ``check``."""
    if budget is None or _is_sane(budget.amount, MAX_BUDGET):
        return {}
    return {f"{path}.amount": _sane(MAX_BUDGET)}


def check_price(price: Price) -> dict[str, str]:
    """As ``check``."""
    return {
        name: _sane(MAX_PRICE)
        for name in Price.__struct_fields__
        if (amount := getattr(price, name)) is not None and not _is_sane(amount, MAX_PRICE)
    }


def _sane(most: int) -> str:
    return f"must be 0 or more, with at most {NUM_DIGITS} digits after the point, and not more than {most}"


def _is_sane(amount: Decimal, most: int, num_digits: int = NUM_DIGITS) -> bool:
    if not amount.is_finite() or not 0 <= amount <= most:
        return False
    # By its digits: normalize() would round a long one to the context's precision.
    _, digits, exponent = amount.as_tuple()
    assert isinstance(exponent, int)
    num_beyond = -num_digits - exponent
    return num_beyond <= 0 or (num_beyond <= len(digits) and not any(digits[-num_beyond:]))


def _whole(amount: Decimal, num_digits: int = NUM_DIGITS) -> int:
    """So many of its last digit."""
    numerator, denominator = amount.as_integer_ratio()
    scale: int = 10**num_digits
    whole, rest = divmod(numerator * scale, denominator)
    assert not rest, f"{amount} has more digits than pricing.check lets through"
    return whole


_known_rates = lru_cache(4096)(rates_of)


def _half_even(cost: int) -> int:
    """``PARTS`` of micro-units to micro-units."""
    micros, rest = divmod(cost, PARTS)
    return micros + (rest > PARTS // 2 or (rest == PARTS // 2 and micros % 2 == 1))
