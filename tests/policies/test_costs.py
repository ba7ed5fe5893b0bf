import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.costs import ChunkPrice, StepCosts, Work, pairs, predicted, shares


def a_machine(seed, a=2e-3, b=3e-5, c=2e-4, d=4e-8, e=2e-8, f=1e-3, g=1e-6):
    """A source of (work, true seconds), with 5 % noise on what is observed."""
    rng = random.Random(seed)
    while True:
        decodes = rng.choice([0, 1, 4, 8, 32])
        chunk = rng.choice([0, 0, 32, 128, 256, 512]) if decodes else rng.choice([128, 512, 1024])
        context = sum(rng.randrange(50, 1000) for _ in range(decodes))
        start = rng.randrange(0, 4000) if chunk else 0
        work = Work(chunk, decodes, context, pairs(chunk, start), int(chunk > 0), start)
        true = a + b * chunk + c * decodes + d * context + e * work.num_prefill_pairs + f * work.num_chunks + g * start
        yield work, true, true * rng.uniform(0.95, 1.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_finds_the_machine_it_runs_on(seed):
    costs, machine = StepCosts(), a_machine(seed)
    for _, (work, _true, seen) in zip(range(600), machine, strict=False):
        costs.observe(work, seen)
    errors = [abs(costs.predict(work) / true - 1) for _, (work, true, _) in zip(range(300), machine, strict=False)]
    assert sorted(errors)[150] < 0.05
    assert sorted(errors)[285] < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_of_short_prompts_a_slow_moment_is_not_taken_for_what_a_long_past_costs(seed):
    """15 ms a step and 0.8 ms a token, as a model of half a billion weights has them on two cores."""
    costs, rng = StepCosts(), random.Random(seed)
    for length in (16, 16, 32, 64, 128):
        for num_decodes, num in ((0, length), (1, 0), (1, 0), (1, 0)):
            work = Work(num, num_decodes, num_decodes * (length + 1), pairs(num, 0), int(num > 0))
            slow = 1.35 if num == 128 else rng.uniform(0.95, 1.05)
            costs.observe(work, slow * (15e-3 + 0.8e-3 * num))
    costs.settle()
    assert costs.predict(Work(512, 0, 0, pairs(512, 0), 1)) == pytest.approx(15e-3 + 0.8e-3 * 512, rel=0.5)
    assert costs.predict(Work(0, 1, 4000)) == pytest.approx(15e-3, rel=0.5)


@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_where_a_step_by_itself_takes_next_to_nothing(seed):
    costs, rng = StepCosts(), random.Random(seed)
    for length in (16, 64, 236, 16, 64, 236):
        slow = 1.3 if length == 236 else rng.uniform(0.9, 1.1)
        costs.observe(Work(length, 0, 0, pairs(length, 0), 1), slow * (1e-3 + 0.8e-3 * length))
        costs.observe(Work(0, 1, length + 1), rng.uniform(0.9, 1.1) * 1e-3)
    costs.settle()
    assert costs.predict(Work(2048, 0, 0, pairs(2048, 0), 1)) < 2.0 * (1e-3 + 0.8e-3 * 2048)


@pytest.mark.parametrize("seed", range(6))
def test_many_steps_that_say_little_of_the_past_do_not_add_up_to_a_price_of_it(seed):
    """As a probe's streams do: 8 of them with 20 tokens each."""
    costs, rng = StepCosts(), random.Random(seed)
    for length in (16, 64, 256, 16, 64):
        costs.observe(Work(length, 0, 0, pairs(length, 0), 1), rng.uniform(0.9, 1.2) * (1e-3 + 40e-6 * length))
        costs.observe(Work(0, 1, length + 1), rng.uniform(0.9, 1.2) * 1.1e-3)
    for context in range(136, 600, 8):
        costs.observe(Work(0, 8, context), rng.uniform(0.9, 1.2) * 1.8e-3)
    costs.settle()
    assert costs.predict(Work(0, 8, 4000)) == pytest.approx(1.9e-3, rel=0.35)


@pytest.mark.parametrize("context_s", [1e-6, 4e-6])
def test_what_a_long_past_costs_is_known_after_hours_of_short_ones(context_s):
    costs, rng = StepCosts(), random.Random(1)

    def step(num, start):
        true = 5e-3 + 0.2e-3 * num + context_s * (start + num / 2) * max(num, 1) / 16
        work = Work(num, 0, 0, pairs(num, start), 1, start) if num else Work(0, 1, start)
        return work, true

    def observe(num, start):
        work, true = step(num, start)
        costs.observe(work, true * rng.uniform(0.97, 1.03))

    for _ in range(60):
        observe(512, rng.choice([3000, 5000, 8000]))
        observe(0, rng.choice([3000, 5000, 8000]))
    known = costs.predict(step(512, 7680)[0]), costs.predict(step(0, 4000)[0])
    for _ in range(1000):
        observe(rng.choice([20, 60, 120]), 0)
        observe(0, rng.randrange(40, 200))
    later = costs.predict(step(512, 7680)[0]), costs.predict(step(0, 4000)[0])
    assert later == pytest.approx(known, rel=0.15)


def test_weights_that_were_told_stay_until_steps_speak_of_them():
    costs = StepCosts.of((5e-3, 2e-4, 1e-3, 1e-6, 1e-7, 0.0, 2e-6))
    work = Work(512, 0, 0, pairs(512, 7680), 1, 7680)
    told = costs.predict(work)
    for _ in range(20):
        costs.observe(Work(0, 1, 100), 6.1e-3)
    assert costs.predict(work) == pytest.approx(told, rel=0.1)


def test_the_fit_follows_a_machine_that_slows_down():
    costs = StepCosts()
    for _, (work, _true, seen) in zip(range(500), a_machine(1), strict=False):
        costs.observe(work, seen)
    for _, (work, _true, seen) in zip(range(800), a_machine(2), strict=False):
        costs.observe(work, seen * 2)
    errors = [
        abs(costs.predict(work) / (2 * true) - 1) for _, (work, true, _) in zip(range(200), a_machine(3), strict=False)
    ]
    assert sorted(errors)[100] < 0.1


def test_a_long_stretch_of_equal_steps_forgets_little_of_the_rest():
    costs = StepCosts()
    for _, (work, _true, seen) in zip(range(400), a_machine(1), strict=False):
        costs.observe(work, seen)
    before = costs.chunk_price.seconds(512, 0)
    rng = random.Random(0)
    for _ in range(20_000):
        costs.observe(Work(0, 8, 4000, 0), (2e-3 + 8 * 2e-4 + 4000 * 4e-8) * rng.uniform(0.9, 1.1))
    assert costs.chunk_price.seconds(512, 0) == pytest.approx(before, rel=0.25)


def test_one_stalled_step_teaches_little():
    costs = StepCosts()
    for _, (work, _true, seen) in zip(range(400), a_machine(1), strict=False):
        costs.observe(work, seen)
    work = Work(0, 8, 4000, 0)
    before = costs.predict(work)
    costs.observe(work, 10.0)
    assert costs.predict(work) < 2 * before


@pytest.mark.parametrize("seed", range(3))
def test_one_step_that_seems_to_take_no_time_teaches_little(seed):
    costs, machine = StepCosts(), a_machine(seed)
    for _, (work, _true, seen) in zip(range(400), machine, strict=False):
        costs.observe(work, seen)
    before = costs.chunk_price.seconds(512, 0)
    costs.observe(Work(512, 8, 4000, pairs(512, 0), 1, 0), 2e-4)
    for _, (work, _true, seen) in zip(range(8), machine, strict=False):
        costs.observe(work, seen)
    assert costs.chunk_price.seconds(512, 0) > before / 2


def test_the_fit_follows_a_machine_that_becomes_much_faster():
    costs = StepCosts()
    for _, (work, _true, seen) in zip(range(500), a_machine(1), strict=False):
        costs.observe(work, seen)
    for _, (work, _true, seen) in zip(range(100), a_machine(2), strict=False):
        costs.observe(work, seen / 100)
    errors = [
        abs(costs.predict(work) / (true / 100) - 1)
        for _, (work, true, _) in zip(range(200), a_machine(3), strict=False)
    ]
    assert sorted(errors)[150] < 0.25


@given(st.floats(1e-9, 1e-3), st.just(0.0) | st.floats(1e-12, 1e-6), st.floats(0, 1), st.integers(0, 100_000))
def test_a_chunk_that_fits_its_budget_is_the_longest_that_does(token_s, pair_s, budget_s, start):
    price = ChunkPrice(token_s, pair_s)
    longest = price.tokens_within(budget_s, start)
    if longest and longest < 1 << 31:
        assert price.seconds(longest, start) <= budget_s * (1 + 1e-9)
        assert price.seconds(longest + 2, start) > budget_s * (1 - 1e-9)


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 64), st.floats(-1, 100)), max_size=60))
@example([(0, 0, 1.0), (0, 1, 1e-153)])
def test_nothing_observed_makes_work_cost_less_than_nothing(observed):
    costs = StepCosts()
    for chunk, decodes, seconds in observed:
        costs.observe(Work(chunk, decodes, decodes * 100, pairs(chunk, 0)), seconds)
    assert costs.predict(Work(1, 1, 1, 1)) >= 0
    assert costs.chunk_price.token_s >= 0
    assert costs.chunk_price.pair_s >= 0


weights = st.one_of(
    st.just(()), st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e-2)), min_size=8, max_size=8).map(tuple)
)


@given(
    weights,
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 8)), max_size=40),
    st.lists(st.tuples(st.integers(2, 600), st.integers(0, 4000)), max_size=5),
    st.floats(1e-6, 10.0),
)
def test_a_step_is_shared_out_to_the_last_second(weights, decodes, chunks, seconds):
    if not decodes and not chunks:
        return
    work = Work(
        sum(length for length, _ in chunks),
        len(decodes),
        sum(start + 1 for start, _ in decodes),
        sum(pairs(*chunk) for chunk in chunks),
        len(chunks),
        sum(start for _, start in chunks),
        sum(num_drafted for _, num_drafted in decodes),
    )
    decode_s, context_s, chunk_price, draft_s = shares(weights, work, seconds)
    parts = [decode_s + context_s * (start + 1) + draft_s * num_drafted for start, num_drafted in decodes]
    parts += [chunk_price.seconds(*chunk) for chunk in chunks]
    assert sum(parts) == pytest.approx(seconds, rel=1e-9)
    assert min(parts) >= 0


def test_a_part_is_what_it_should_cost_and_everybody_pays_alike_for_the_step_itself():
    weights = (1e-3, 1e-5, 1e-4, 1e-8, 0.0, 2e-4, 0.0, 0.0)
    work = Work(100, 3, 1000, pairs(100, 0), 1, 0)
    decode_s, context_s, chunk, _ = shares(weights, work, predicted(weights, work))
    assert decode_s == pytest.approx(1e-4 + 1e-3 / 4)
    assert context_s == pytest.approx(1e-8)
    assert chunk.seconds(100, 0) == pytest.approx(100 * 1e-5 + 2e-4 + 1e-3 / 4)


def test_while_nothing_is_known_all_tokens_are_alike():
    decode_s, context_s, chunk, _ = shares((), Work(60, 4, 4000, pairs(60, 0), 1, 0), 1.0)
    assert (decode_s, context_s, chunk.seconds(60, 0)) == pytest.approx((1 / 64, 0.0, 60 / 64))
