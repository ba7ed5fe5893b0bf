import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rate import LEASE_MS, MINUTE_MS, NUM_SLOTS, Leases, Purse, Window

SLOT_MS = MINUTE_MS // NUM_SLOTS


def a_window(*added):
    """(instant, amount) each."""
    window = Window(SLOT_MS)
    for at_ms, amount in added:
        window.add(amount, at_ms)
    return window


def test_an_amount_counts_for_the_window_and_at_most_a_slot_longer():
    for at_ms in (0, 1, SLOT_MS - 1, SLOT_MS, 12_345):
        window = a_window((at_ms, 7))
        assert window.total_at(at_ms + MINUTE_MS) == 7
        assert window.total_at(at_ms + MINUTE_MS + SLOT_MS) == 0


def test_what_was_not_used_goes_back_to_the_instant_at_which_it_was_taken():
    window = a_window((0, 10), (30_000, 10))
    window.give_back(4, 0, 40_000)
    assert window.total_at(40_000) == 16
    assert window.wait_ms(6, 40_000) == 21_000
    assert window.total_at(61_000) == 10
    window.give_back(4, 0, 61_000)
    assert window.total_at(61_000) == 10


def test_a_window_says_when_it_will_be_empty():
    window = a_window((0, 3), (30_000, 5))
    assert window.reset_ms(30_000) == 61_000
    window.give_back(5, 30_000, 30_000)
    assert window.reset_ms(30_000) == 31_000
    assert window.reset_ms(61_000) == 0


def test_a_clock_that_was_set_back_lets_nothing_be_forgotten_early():
    window = a_window((100_000, 1), (90_000, 1))
    assert window.total_at(100_000 + MINUTE_MS) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_long_walk_agrees_with_a_plain_list_of_what_came(seed):
    rng, now_ms, window = random.Random(seed), 0, Window(SLOT_MS)
    came: list[list[int]] = []
    for _ in range(5000):
        now_ms += rng.choice([0, 1, 37, 999, 4000, 70_000])
        if rng.random() < 0.3 and came:
            taken = rng.choice(came)
            amount = min(rng.randrange(5), taken[1])
            window.give_back(amount, taken[0], now_ms)
            if now_ms // SLOT_MS - taken[0] // SLOT_MS <= NUM_SLOTS:
                taken[1] -= amount
        else:
            came.append([now_ms, rng.randrange(100)])
            window.add(came[-1][1], now_ms)
        came = [entry for entry in came if now_ms // SLOT_MS - entry[0] // SLOT_MS <= NUM_SLOTS]
        total = sum(amount for _, amount in came)
        assert window.total_at(now_ms) == total == sum(window.slots[1::2]), seed
        assert all(window.slots[1::2]), seed
        assert total >= sum(amount for at_ms, amount in came if at_ms > now_ms - MINUTE_MS), seed
        if total:
            excess = rng.randrange(1, total + 1)
            wait_ms = window.wait_ms(excess, now_ms)
            assert total - a_copy(window).total_at(now_ms + wait_ms) >= excess, seed
            assert total - a_copy(window).total_at(now_ms + wait_ms - 1) < excess, seed
            assert a_copy(window).total_at(now_ms + window.reset_ms(now_ms)) == 0, seed


def a_copy(window):
    return Window(window.slot_ms, window.total, window.slots[:])


def test_a_lease_ends_by_itself_unless_it_is_renewed():
    leases = Leases()
    leases.hold("one", 1, 0)
    leases.hold("two", 5, 0)
    leases.renew("two", LEASE_MS - 1)
    assert leases.total_at(LEASE_MS) == 5
    leases.renew("one", LEASE_MS)
    assert leases.total_at(LEASE_MS) == 5
    leases.release("one", LEASE_MS)
    leases.release("two", LEASE_MS)
    assert leases.total_at(LEASE_MS) == 0
    assert leases.held == {}


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 5), st.sampled_from("hrx"), st.integers(0, 9))))
def test_leases_agree_with_a_plain_table(steps):
    now_ms, leases, table = 0, Leases(), {}
    for passed, number, what, amount in steps:
        now_ms += passed
        table = {name: (until, held) for name, (until, held) in table.items() if until > now_ms}
        name = str(number)
        match what:
            case "h":
                leases.total_at(now_ms)
                leases.hold(name, amount, now_ms)
                table[name] = (now_ms + LEASE_MS, table.get(name, (0, 0))[1] + amount)
            case "r":
                leases.renew(name, now_ms)
                if name in table:
                    table[name] = (now_ms + LEASE_MS, table[name][1])
            case _:
                leases.release(name, now_ms)
                table.pop(name, None)
        assert leases.total_at(now_ms) == sum(held for _, held in table.values())
        assert leases.held == table


def test_a_purse_holds_what_may_be_spent_until_it_is():
    purse = Purse()
    purse.leases.hold("one", 100, 0)
    assert purse.total_at(0) == 100
    assert purse.settle("one", 30, 10) == 30
    assert purse.total_at(10) == 30
