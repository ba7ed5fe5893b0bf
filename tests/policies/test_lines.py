"""Lines of batches: their class, their price, how many may be under way, and which begin alike."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import pricelist, pricing
from policies.lines import AHEAD, LEAD, likeness, lines_share, may_send, policy_for_lines
from policies.policy import Policy, Price
from policies.pricelist import Listed, Origin, PriceList
from policies.settings import CLASSES
from policies.terms import Usage

shares = st.integers(0, 9999).map(lambda parts: Decimal(parts) / 10_000)


def test_lines_are_in_the_least_important_class_whatever_the_policy_allows():
    policy = policy_for_lines(Policy(sla_class="interactive", sla_classes=("interactive",)), CLASSES)
    assert (policy.sla_class, policy.sla_classes) == ("batch", ("batch",))


def test_a_line_costs_half_unless_the_policy_says_otherwise():
    price, usage = Price(prompt=Decimal(10), completion=Decimal(40)), Usage(1000, 0, 100)
    for words, whole in (({}, Decimal("0.5")), ({"batch_discount": Decimal("0.25")}, Decimal("0.75"))):
        policy = policy_for_lines(Policy(**words), CLASSES)
        priced = pricelist.priced(policy, "p", 1, PriceList([Listed(1, "*", "*", 0, price)]), "m", "batch", 1.0)
        assert pricing.cost_micros(priced.rates, usage) == 14_000 * whole


@given(shares, shares)
def test_both_discounts_together_are_one_that_a_row_remembers(discount, batch_discount):
    policy = policy_for_lines(Policy(discount=discount, batch_discount=batch_discount), CLASSES)
    assert pricing.check(policy) == {}
    assert abs((1 - policy.discount) - (1 - discount) * (1 - batch_discount)) <= Decimal("0.0001")
    origin = Origin(1, "", 0, policy.discount)
    assert Origin.of(str(origin)) == origin


@pytest.mark.parametrize("discount", ["1", "-0.1", "0.12345", "NaN"])
def test_a_discount_that_cannot_be_counted_is_named(discount):
    assert "batch_discount" in pricing.check(Policy(batch_discount=Decimal(discount)))


@given(st.integers(0, 300), st.integers(1, 256), st.integers(0, 100), st.lists(st.integers(0, 100)), st.integers(0, 50))
def test_more_is_sent_only_where_there_is_room(num_under_way, most, num_own, others, num_in_line):
    if may_send(num_under_way, most, num_own, others, num_in_line):
        assert num_under_way < most
        assert num_own == 0 or (num_in_line < AHEAD and all(num_own <= other + LEAD for other in others))
    elif num_under_way < most:
        assert num_own > 0


def test_a_batch_with_nothing_under_way_may_send_however_long_the_line_is():
    assert may_send(5, 128, 0, [5], 1000)
    assert not may_send(128, 128, 0, [128], 0)


@given(st.integers(1, 10**9))
def test_lines_never_have_all_of_a_limit_but_of_the_smallest(ceiling):
    assert 1 <= lines_share(ceiling) <= ceiling
    assert lines_share(ceiling) < ceiling or ceiling == 1


def test_lines_that_begin_alike_follow_each_other():
    long = [b"x" * 5000 + bytes([end]) for end in b"ab"]
    said = [(b"tools", long[0]), (b"", b"short"), (b"tools", long[1]), (b"", b"short and more"), (b"tools", long[0])]
    keys = [likeness("m", *parts) for parts in said]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    assert order == [1, 3, 0, 2, 4]
    assert likeness("a", b"z") < likeness("b", b"a")
