"""What is judged of servers that are not ours: breakers, choices, retries, counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.upstreams.breaker import LONGEST_S, Breaker
from policies.upstreams.choice import Candidate, Latency, choose, drawn, percentile
from policies.upstreams.counting import Counts, estimated, verdict
from policies.upstreams.retries import LONGEST_S as LONGEST_PAUSE_S
from policies.upstreams.retries import MAX_SAVED, MIN_A_SECOND, Budget, pause_s

steps = st.lists(st.tuples(st.sampled_from("asfgpw"), st.floats(0, 30)), max_size=80)
draws = st.floats(0, 1, exclude_max=True)


@given(steps, st.integers(1, 5), st.floats(0.1, 100))
def test_a_breaker_goes_its_three_ways(steps, max_failures, open_s):
    """Closed it admits everybody, open nobody, half open one at a time; it opens after so many failures in a row and at
    no other time, and never for longer than it may."""
    breaker, now, in_a_row = Breaker(max_failures, open_s), 0.0, 0
    for step, seconds in steps:
        before = breaker.state(now)
        match step:
            case "a":
                if breaker.admits(now):
                    breaker = breaker.asked(now)
                    assert before != "open"
                    assert before == "closed" or not breaker.admits(now)
                else:
                    assert before != "closed"
            case "s":
                breaker = breaker.succeeded(now)
                in_a_row = 0 if before != "open" else in_a_row
                assert breaker.state(now) == ("open" if before == "open" else "closed")
            case "f":
                breaker = breaker.failed(now)
                in_a_row = in_a_row + 1 if before == "closed" else 0
                opened = before == "half_open" or in_a_row == max_failures
                assert breaker.state(now) == ("open" if opened else before)
                in_a_row = 0 if opened else in_a_row
            case "g":
                breaker = breaker.given_up()
                assert breaker.state(now) == before
                assert before == "open" or breaker.admits(now)
            case "p":
                breaker = breaker.seen(now)
                assert breaker.state(now) == ("half_open" if before == "open" else before)
            case _:
                now += seconds
        assert breaker.retry_after_s(now) <= max(open_s, LONGEST_S) + 1e-6
        assert (breaker.retry_after_s(now) > 0) == (breaker.state(now) == "open")
    now += breaker.retry_after_s(now) + 2 * max(open_s, LONGEST_S)
    assert breaker.admits(now), "nothing is shut out for ever, also when a trial was never heard of again"


def test_each_failed_trial_doubles_the_time_up_to_a_minute():
    breaker, now, lengths = Breaker(1, 5.0), 0.0, []
    for _ in range(6):
        breaker = breaker.failed(now)
        lengths.append(breaker.retry_after_s(now))
        now += lengths[-1]
        breaker = breaker.asked(now)
    assert lengths == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert breaker.succeeded(now).failed(now).retry_after_s(now) == 5.0


def test_a_trial_that_is_never_heard_of_keeps_others_away_for_as_long_as_it_was_open_and_no_longer():
    breaker = Breaker(1, 5.0).failed(0.0).asked(5.0)
    assert not breaker.admits(9.9)
    assert breaker.admits(10.0)


def test_a_probe_that_is_answered_after_a_failed_trial_lets_the_next_one_through():
    breaker = Breaker(1, 5.0).failed(0.0).asked(5.0).failed(6.0)
    assert not breaker.admits(7.0)
    assert breaker.seen(7.0).admits(7.0)


candidates = st.lists(
    st.builds(
        Candidate,
        st.floats(0.1, 100),
        st.one_of(st.just(Latency()), st.builds(Latency, st.floats(1e-4, 10), st.just(0.0))),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=8,
)


@given(candidates, draws, draws, st.booleans())
def test_a_choice_is_one_of_them_and_no_worse_than_another_that_was_drawn(candidates, one, two, by_latency):
    place = choose(candidates, (one, two), by_latency)
    assert 0 <= place < len(candidates)
    if len(candidates) == 2 and by_latency and all(each.latency.at is not None for each in candidates):
        costs = [each.latency.average_s * (each.num_open + 1) / each.weight for each in candidates]
        assert costs[place] == min(costs)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), draws)
def test_whoever_is_drawn_has_a_weight(weights, draw):
    assert 0 <= drawn(weights, draw) < len(weights)


def test_draws_go_by_weight():
    rng = random.Random(7)
    places = [drawn([3.0, 1.0], rng.random()) for _ in range(4000)]
    assert 0.22 < sum(places) / 4000 < 0.28


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1e-4, 60)), min_size=1, max_size=40))
def test_an_average_follows_peaks_at_once_and_stays_between_what_was_seen(observed):
    latency, now, seen = Latency(), 0.0, []
    for gap, seconds in observed:
        now += gap
        before, latency = latency, latency.observed(seconds, now)
        seen.append(seconds)
        assert min(seen) - 1e-9 <= latency.average_s <= max(seen) + 1e-9
        assert latency.average_s >= min(seconds, before.average_s or seconds) - 1e-9
        if seconds >= before.average_s:
            assert latency.average_s == seconds


def test_an_idle_one_and_one_that_nobody_knows_are_preferred():
    slow, fast = Candidate(1.0, Latency(2.0, 0.0), 0), Candidate(1.0, Latency(0.1, 0.0), 3)
    new = Candidate(1.0, Latency(), 0)
    assert choose([slow, fast], (0.0, 0.0)) == 1
    assert choose([fast, new], (0.0, 0.0)) == 1
    assert percentile([1.0] * 19, 0.95) is None
    assert percentile([float(n) for n in range(100)], 0.95) == 95.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=300), st.floats(0, 1))
def test_retries_are_a_share_of_what_is_sent_and_a_few(events, share):
    budget, now, num_sent, num_retries = Budget(share), 0.0, 0, 0
    for is_retry, gap in events:
        now += gap
        if is_retry:
            left = budget.spent(now)
            if left is not None:
                budget, num_retries = left, num_retries + 1
        else:
            budget, num_sent = budget.sent(now), num_sent + 1
        assert -1e-9 <= budget.level <= MAX_SAVED
        assert num_retries <= MAX_SAVED + share * num_sent + MIN_A_SECOND * now + 1e-6
        assert share or not num_retries


@given(st.integers(0, 100), draws, st.one_of(st.none(), st.floats(0, 1000)))
def test_a_pause_is_no_shorter_than_asked_for_and_never_long(num_retries, draw, asked_s):
    pause = pause_s(num_retries, draw, asked_s)
    if asked_s is not None and asked_s > LONGEST_PAUSE_S:
        assert pause is None
    else:
        assert pause is not None
        assert (asked_s or 0.0) <= pause <= 2 * LONGEST_PAUSE_S


counts = st.builds(Counts, st.integers(-10, 10**6), st.integers(-10, 10**6))


@given(st.one_of(st.none(), counts), st.builds(Counts, st.integers(0, 10**4), st.integers(0, 10**4)), st.booleans())
def test_what_cannot_be_is_never_billed(told, counted, is_exact):
    found = verdict(told, counted, is_exact, 5000, 5000)
    if told is None:
        assert found == ("gateway", True)
    elif found.counted_by == "upstream":
        assert all(0 <= each <= 5000 and (each or not ours) for each, ours in zip(told, counted, strict=True))
    else:
        assert not found.agrees
    assert verdict(counted, counted, is_exact, 10**4, 10**4) == ("upstream", True)


@pytest.mark.parametrize(
    ("told", "is_exact", "agrees"), [(110, True, True), (130, True, False), (190, False, True), (400, False, False)]
)
def test_an_estimate_may_be_further_off_than_a_count(told, is_exact, agrees):
    assert verdict(Counts(10, told), Counts(10, 100), is_exact, 10**6, 10**6).agrees is agrees


@pytest.mark.parametrize("told", [Counts(1, 100), Counts(10, 1), Counts(900, 900)])
def test_what_an_upstream_may_have_counted_is_billed_be_it_less_than_was_counted_here_or_more(told):
    assert verdict(told, Counts(10, 100), True, 1000, 1000).counted_by == "upstream"
    assert verdict(told, Counts(10, 100), False, 1000, 1000).counted_by == "upstream"


def test_an_estimate_is_a_token_for_four_bytes():
    assert [estimated(num) for num in (0, 1, 4, 5, 400)] == [0, 1, 1, 2, 100]
