from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import pricing
from policies.policy import FREE, Policy, Price
from policies.pricelist import Listed, Origin, PriceList, priced

NAMES = ("*", "a", "b")
prices = st.none() | st.builds(Price, prompt=st.decimals(0, 10, places=6))
lists = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(0, 20), prices), max_size=30
).map(lambda rows: [Listed(version, *row) for version, row in enumerate(rows, 1)])
instants = st.integers(-1, 21)
places = st.sampled_from(("a", "b", "c"))


def plainly(entries, model, sla_class, unix_s):
    """The same, read off the list."""
    for place in ((model, sla_class), (model, "*"), ("*", sla_class), ("*", "*")):
        mine = [e for e in entries if (e.model, e.sla_class) == place and e.effective_from <= unix_s]
        if mine and (last := max(mine, key=lambda e: (e.effective_from, e.version))).price is not None:
            return last
    return None


@given(lists, places, places, instants)
def test_the_most_particular_entry_in_force_counts_and_of_those_the_latest(entries, model, sla_class, unix_s):
    assert PriceList(entries).find(model, sla_class, unix_s) == plainly(entries, model, sla_class, unix_s)


@given(lists, places, places, instants)
def test_nothing_changes_before_the_instant_that_is_told(entries, model, sla_class, unix_s):
    listed = PriceList(entries)
    until = listed.changes_at(unix_s)
    assert until > unix_s
    assert until in [*(entry.effective_from for entry in entries), float("inf")]
    before = listed.find(model, sla_class, unix_s)
    assert all(listed.find(model, sla_class, at) == before for at in range(unix_s, min(int(min(until, 30)), 30)))


@given(lists, st.integers(0, 30), instants, places, places)
def test_what_is_over_is_dropped_and_missed_by_nobody(entries, num_known, unix_s, model, sla_class):
    grown = PriceList(entries[:num_known]).extended(entries[num_known:], unix_s)
    assert len(grown) <= len(entries)
    assert sum(entry.effective_from > unix_s for entry in entries) <= len(grown)
    for at in range(unix_s, 22):
        assert grown.find(model, sla_class, at) == plainly(entries, model, sla_class, at)


def test_a_policys_own_price_goes_before_the_list_and_its_discount_is_off_either():
    listed = PriceList([Listed(7, "*", "*", 0, Price(prompt=Decimal(2)))])
    own, off = Price(prompt=Decimal(5)), Decimal("0.10")

    def of(policy):
        found = priced(policy, "gold", 3, listed, "demo", "standard", 1.0)
        return found.version, found.rates

    assert of(Policy(prices={"demo": own})) == ("policy:gold@3", pricing.rates_of(own))
    assert of(Policy(prices={"*": own}, discount=off)) == ("policy:gold@3;discount=0.1", pricing.rates_of(own, off))
    assert of(Policy(prices={"other": own})) == ("list:7", pricing.rates_of(Price(prompt=Decimal(2))))
    assert of(Policy(discount=off)) == ("list:7;discount=0.1", pricing.rates_of(Price(prompt=Decimal("1.8"))))
    nothing = priced(Policy(discount=off), "gold", 3, PriceList(), "demo", "standard", 1.0)
    assert (nothing.version, nothing.rates) == ("free", pricing.rates_of(FREE))


@given(
    st.integers(1, 10**15),
    st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}", fullmatch=True),
    st.decimals(0, Decimal("0.9999"), places=4),
)
def test_the_words_of_a_price_say_where_it_came_from(number, name, discount):
    origin = Origin(number, "", 0, discount) if name is None else Origin(None, name, number, discount)
    assert Origin.of(str(origin)) == origin


@pytest.mark.parametrize("model", ["demo", "größer", "a;b", "a;model=b", "org/name:7b@1"])
@pytest.mark.parametrize("discount", [Decimal(0), Decimal("0.25")])
def test_the_words_of_an_adapters_price_name_its_model_whatever_that_is_called(model, discount):
    origin = Origin(None, "gold", 3, discount, model)
    assert Origin.of(str(origin)) == Origin.of(f"{origin};batch") == origin


@pytest.mark.parametrize("text", ["", "free"])
def test_without_a_price_there_is_no_origin(text):
    assert Origin.of(text) is None


@pytest.mark.parametrize("text", ["list:", "list:x", "policy:gold", "list:1;discount=2", "list:1 ", "cheap"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="names no price"):
        Origin.of(text)
