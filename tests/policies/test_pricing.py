from decimal import Decimal
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import pricing
from policies.policy import Budget, Policy, Price
from policies.terms import Usage

money = st.decimals(0, 1000, places=6)
prices = st.builds(
    Price,
    prompt=money,
    cached_prompt=st.none() | money,
    completion=money,
    reasoning=st.none() | money,
    cache_hit=money,
    request=money,
    engine_second=money,
)
discounts = st.decimals(0, Decimal("0.9999"), places=4)
counts = st.integers(0, 10**6)
usages = st.tuples(counts, counts, counts, counts).map(
    lambda counts: Usage(counts[0] + counts[1], counts[1], counts[2] + counts[3], counts[3])
)
outcomes = st.sampled_from(["miss", "bypass", "hit", "shared"])


@given(prices, discounts, usages, outcomes, counts)
def test_a_cost_is_the_exact_sum_rounded_once_half_to_even(price, discount, usage, outcome, engine_us):
    if outcome in ("hit", "shared"):
        exact = Fraction(price.cache_hit) * (usage.num_prompt_tokens + usage.num_completion_tokens)
    else:
        cached = price.prompt if price.cached_prompt is None else price.cached_prompt
        exact = Fraction(price.prompt) * (usage.num_prompt_tokens - usage.num_cached_tokens)
        exact += Fraction(cached) * usage.num_cached_tokens
        exact += Fraction(price.completion) * (usage.num_completion_tokens - usage.num_reasoning_tokens)
        reasoning = price.completion if price.reasoning is None else price.reasoning
        exact += Fraction(reasoning) * usage.num_reasoning_tokens + Fraction(price.engine_second) * engine_us
    # A price is for a million tokens or for a second, so times tokens or microseconds it is in micro-units already.
    exact += Fraction(price.request) * 10**6
    rates = pricing.rates_of(price, discount)
    assert pricing.cost_micros(rates, usage, outcome, engine_us) == round(exact * (1 - Fraction(discount)))
    assert pricing.cost_micros(price, usage, outcome, engine_us) == round(exact)


def test_a_kind_that_is_said_to_cost_nothing_is_free_and_one_that_is_not_named_costs_as_the_whole():
    usage = Usage(1000, 400, 100, 30)
    whole = Price(prompt=Decimal(2), completion=Decimal(8))
    assert pricing.cost_micros(whole, usage) == 1000 * 2 + 100 * 8
    free = msgspec.structs.replace(whole, cached_prompt=Decimal(0), reasoning=Decimal("0.00"))
    assert pricing.cost_micros(free, usage) == 600 * 2 + 70 * 8


@given(prices, discounts, usages, outcomes, counts)
def test_the_parts_of_a_cost_add_up_to_it_and_each_is_within_a_micro_unit_of_its_own(
    price, discount, usage, outcome, engine_us
):
    rates = pricing.rates_of(price, discount)
    parts = pricing.parts(rates, usage, outcome, engine_us)
    quantities = pricing.quantities(usage, outcome, engine_us)
    assert sum(parts.values()) == pricing.cost_micros(rates, usage, outcome, engine_us)
    assert parts.keys() == quantities.keys()
    for kind, micros in parts.items():
        assert abs(micros - Fraction(getattr(rates, kind) * quantities[kind], pricing.PARTS)) < 1


@given(prices, st.lists(st.tuples(usages, counts), min_size=1, max_size=20), outcomes)
def test_the_parts_of_many_requests_add_up_to_what_their_rows_add_up_to(price, requests, outcome):
    rates = pricing.rates_of(price)
    cost = sum(pricing.cost_micros(rates, usage, outcome, engine_us) for usage, engine_us in requests)
    total = Usage(*(sum(getattr(usage, name) for usage, _ in requests) for name in Usage.__struct_fields__))
    engine_us = sum(engine_us for _, engine_us in requests)
    parts = pricing.parts(rates, total, outcome, engine_us, len(requests), cost)
    assert sum(parts.values()) == cost
    for kind, quantity in pricing.quantities(total, outcome, engine_us, len(requests)).items():
        assert abs(parts[kind] - Fraction(getattr(rates, kind) * quantity, pricing.PARTS)) <= 1 + len(requests)
        assert parts[kind] >= 0


@pytest.mark.parametrize(
    ("price", "cost", "parts"),
    [
        (Price(prompt=Decimal("0.02"), completion=Decimal("0.06")), 0, {"prompt": 0, "completion": 0}),
        (Price(prompt=Decimal("0.05"), completion=Decimal("0.2")), 1, {"prompt": 310, "completion": 690}),
    ],
)
def test_of_what_many_small_costs_were_rounded_by_each_kind_has_its_share(price, cost, parts):
    rates = pricing.rates_of(price)
    assert pricing.cost_micros(rates, Usage(9, 0, 5)) == cost
    found = pricing.parts(rates, Usage(9000, 0, 5000), num_requests=1000, cost=1000 * cost)
    assert {kind: micros for kind, micros in found.items() if kind != "request"} == parts
    assert sum(found.values()) == 1000 * cost


@given(prices, usages, st.integers(-(10**12), 10**12))
def test_the_parts_of_a_correction_add_up_to_whatever_it_takes_back(price, usage, cost):
    taken = Usage(*(-getattr(usage, name) for name in Usage.__struct_fields__))
    parts = pricing.parts(pricing.rates_of(price), taken, num_requests=0, cost=cost)
    assert sum(parts.values()) == cost


@pytest.mark.parametrize("num_requests", [1, 20])
def test_the_parts_of_a_cost_without_a_price_are_those_of_the_request(num_requests):
    free = pricing.rates_of(Price())
    assert pricing.parts(free, Usage(10, 0, 5), num_requests=num_requests, cost=7) == {
        "prompt": 0,
        "completion": 0,
        "request": 7,
    }


@given(prices, discounts, usages, st.sampled_from(["miss", "hit"]))
def test_the_worst_case_is_enough_and_what_it_is_enough_for_is_known(price, discount, usage, outcome):
    rates = pricing.rates_of(price, discount)
    worst = pricing.worst_case_micros(rates, usage.num_prompt_tokens, usage.num_completion_tokens)
    assert pricing.cost_micros(rates, usage, outcome) <= worst
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
    assert list(pricing.check(policy)) == ["prices.demo.cached_prompt", "budget.amount"]


@pytest.mark.parametrize("right", ["0", "0.000001", "2.50", "1e3", "1000000", "1.1000000000"])
def test_money_with_at_most_six_digits_after_the_point_is_fine(right):
    policy = Policy(prices={"*": Price(completion=Decimal(right))}, budget=Budget(Decimal(right)))
    assert pricing.check(policy) == {}
    assert pricing.budget_micros(Decimal(right)) == Fraction(right) * 10**6


@pytest.mark.parametrize("wrong", ["-0.1", "1", "1.5", "0.00001", "0.99999", "NaN", "Infinity"])
def test_a_discount_is_less_than_everything_and_has_at_most_four_digits(wrong):
    assert list(pricing.check(Policy(discount=Decimal(wrong)))) == ["discount"]


@pytest.mark.parametrize("right", ["0", "0.0001", "0.9999", "0.2500000"])
def test_a_discount_with_at_most_four_digits_is_fine(right):
    assert pricing.check(Policy(discount=Decimal(right))) == {}
