from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import pricing
from policies.policy import Budget, Policy, Price
from policies.terms import Usage

money = st.decimals(0, 1000, places=6)
prices = st.builds(
    Price, prompt=money, cached_prompt=st.none() | money, completion=money, cache_hit=money, request=money
)
usages = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)).map(
    lambda counts: Usage(counts[0] + counts[1], counts[1], counts[2])
)


@given(prices, usages, st.sampled_from(["miss", "bypass", "hit", "shared"]))
def test_a_cost_is_the_exact_sum_rounded_once_half_to_even(price, usage, outcome):
    if outcome in ("hit", "shared"):
        exact = Fraction(price.cache_hit) * (usage.num_prompt_tokens + usage.num_completion_tokens)
    else:
        cached = price.prompt if price.cached_prompt is None else price.cached_prompt
        exact = Fraction(price.prompt) * (usage.num_prompt_tokens - usage.num_cached_tokens)
        exact += Fraction(cached) * usage.num_cached_tokens + Fraction(price.completion) * usage.num_completion_tokens
    # A price is for a million tokens, so tokens times price is in micro-units already.
    exact += Fraction(price.request) * 10**6
    assert pricing.cost_micros(price, usage, outcome) == round(exact)


@given(prices, usages, st.sampled_from(["miss", "hit"]))
def test_the_worst_case_is_enough_and_what_it_is_enough_for_is_known(price, usage, outcome):
    rates = pricing.rates_of(price)
    worst = pricing.worst_case_micros(rates, usage.num_prompt_tokens, usage.num_completion_tokens)
    assert pricing.cost_micros(price, usage, outcome) <= worst
    enough_for = pricing.affordable_tokens(rates, usage.num_prompt_tokens, worst)
    assert enough_for is None or enough_for >= usage.num_completion_tokens
    if enough_for is not None:
        assert pricing.worst_case_micros(rates, usage.num_prompt_tokens, enough_for) <= worst
        assert pricing.worst_case_micros(rates, usage.num_prompt_tokens, enough_for + 1) > worst


@pytest.mark.parametrize(("tokens", "micros"), [(1, 0), (2, 1), (3, 2), (5, 2), (7, 4)])
def test_half_a_micro_unit_goes_to_the_even_one(tokens, micros):
    assert pricing.cost_micros(Price(completion=Decimal("0.5")), Usage(0, 0, tokens)) == micros


@pytest.mark.parametrize(
    "wrong", ["-0.01", "0.0000001", "NaN", "Infinity", "-Infinity", "1e30", "1e-30", "1e-999999999", f"0.1{0:040}1"]
)
def test_money_that_cannot_be_counted_is_named_by_its_field(wrong):
    price = Price(prompt=Decimal("0.15"), cached_prompt=Decimal(wrong))
    policy = Policy(prices={"demo": price}, budget=Budget(Decimal(wrong)))
    assert pricing.check(policy) == ["prices.demo.cached_prompt", "budget.amount"]


@pytest.mark.parametrize("right", ["0", "0.000001", "2.50", "1e3", "1000000", "1.1000000000"])
def test_money_with_at_most_six_digits_after_the_point_is_fine(right):
    policy = Policy(prices={"*": Price(completion=Decimal(right))}, budget=Budget(Decimal(right)))
    assert pricing.check(policy) == []
    assert pricing.budget_micros(Decimal(right)) == Fraction(right) * 10**6
