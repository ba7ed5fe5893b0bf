"""What a step may take: chunks by promise, what that keeps, pauses, displacement by deadline, and tenants' turns."""

import random

import pytest

from policies.batching import MIN_CHUNK, Limits, Turns, party_of
from policies.batching.pace import LEAST, MAX_STRETCH
from policies.simulation.worker import Promise, Simulated, Worker
from tests.policies.plans import a_machine_that_takes, decoding, newcomer, plan, prefilling

PACED = Limits(max_step_tokens=2048, max_prefill_tokens_beside_decodes=2048, max_sequences=64, max_slowdown=2.0)
FULL = Limits(max_step_tokens=2048, max_prefill_tokens_beside_decodes=2048, max_sequences=2, max_slowdown=2.0)


def chunk_of(made, arrival):
    return dict(made.grants)[arrival]


def test_prompts_may_take_as_long_as_the_streams_beside_them():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5)
    made = plan([decoding(1), decoding(2), prefilling(3, 5000)], [], 10, PACED, costs)
    assert 180 <= chunk_of(made, 3) <= 230  # 2.1 ms of decodes, so 2.1 ms for the prompt, at 10 us a token


def test_a_tight_promise_makes_chunks_shorter_and_a_loose_one_leaves_them_as_they_are():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5)

    def chunk(*promises, due=99.0):
        streams = [decoding(arrival, tpot_s=tpot_s) for arrival, tpot_s in enumerate(promises)]
        return chunk_of(plan([*streams, prefilling(99, 5000)], [], 10, PACED, costs, due=due), 99)

    assert chunk(None, None) == chunk(1.0, None) == chunk(1.0, 1.0)
    assert 80 <= chunk(1.0, 3e-3) <= 95  # 2.1 of 3 ms are the streams'
    assert 50 <= chunk(1.0, 3e-3, due=[99.0, 3.4e-3, 99.0]) <= 60  # one that is hardly ahead is to catch up
    assert 45 <= chunk(1e-3, 1.0) <= 55  # what is broken in any case does not keep prompts from arriving


def test_a_first_token_in_danger_may_have_all_that_the_streams_are_ahead_of_their_promises():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5)
    streams = [decoding(1, tpot_s=0.01), decoding(2, tpot_s=0.01)]

    def chunk(due_at, running=streams, token_due_at=99.0):
        prompt = prefilling(3, 5000, due_at=due_at, ttft_s=1.0)
        due = [token_due_at] * 3
        return chunk_of(plan([*running, prompt], [], 10, PACED, costs, due=due, now=10.0), 3)

    assert chunk(11.0) < 230  # 50 ms of work at half of each step
    assert chunk(10.07) == 2046  # three gaps of 10 ms would do for more
    assert 500 <= chunk(10.07, token_due_at=10.01) <= 550  # 7.5 ms of steps, 2.1 of them for the streams
    assert chunk(10.07, [decoding(1), streams[1]]) < 230  # where nothing is promised streams stay smooth
    tight, loose = decoding(1, tpot_s=3e-3), decoding(2, tpot_s=1.0)
    assert 650 <= chunk(10.07, [tight, loose]) == chunk(10.07, [loose, tight]) <= 700  # three gaps of the tightest


def test_a_burst_of_prompts_gets_the_longer_share_beside_few_streams_but_breaks_no_promise():
    def num_tokens(num_decodes, num_waiting, token_s=1e-4, **promise):
        costs = a_machine_that_takes(decode_s=1e-3, token_s=token_s)
        running = [*(decoding(arrival, **promise) for arrival in range(num_decodes)), prefilling(98, 5000)]
        waiting = [newcomer(99 + number, 5000, blocks=999) for number in range(num_waiting)]
        return chunk_of(plan(running, waiting, 10, PACED, costs, due=99.0), 98)

    assert num_tokens(1, 0) < 20
    assert 75 <= num_tokens(8, 0) <= 85
    assert 310 <= num_tokens(8, 1) <= 330  # 32 ms, four times their share
    assert 310 <= num_tokens(32, 1) <= 330  # no more than that share
    assert 950 <= num_tokens(8, 3) <= 990
    assert 290 <= num_tokens(8, 15, token_s=1e-3) <= 300  # the longest step of a burst
    assert 110 <= num_tokens(8, 15, tpot_s=0.02) <= 125


def test_the_farther_into_a_prompt_the_shorter_its_chunks():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5, pair_s=1e-8)
    chunks = []
    for start in (0, 1000, 4000, 16000):
        claim = prefilling(3, 5000)._replace(start=start)
        chunks.append(chunk_of(plan([decoding(1), claim], [], 10, PACED, costs), 3))
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > 2 * chunks[-1] >= 2 * MIN_CHUNK


def test_the_first_prompt_in_order_always_moves_and_the_others_wait_their_turn():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-3)
    made = plan([decoding(1), prefilling(2, 500), prefilling(3, 500)], [], 10, PACED, costs)
    assert made.grants == [(1, 1), (2, MIN_CHUNK)]


def test_without_streams_nobody_is_slowed_down():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    assert plan([prefilling(2, 5000)], [], 10, PACED, costs).grants == [(2, 2048)]


def test_on_a_slow_machine_no_step_takes_much_longer_than_a_second():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-2)
    ((_, num_tokens),) = plan([prefilling(2, 5000)], [], 10, PACED, costs).grants
    assert 90 <= num_tokens <= 105


# What that keeps

SEQUENCES, DECODE_S, TIGHTEST_S = 16, 1e-3, 0.025


@pytest.mark.parametrize("seed", range(6))
def test_where_it_can_be_kept_every_answers_mean_gap_is_and_no_single_one_is_stretched_farther(seed):
    """After every token; prompts of all lengths come faster than they can be computed."""
    assert SEQUENCES * DECODE_S * (1 + LEAST) < TIGHTEST_S
    draw = random.Random(seed)
    limits = Limits(2048, 2048, SEQUENCES, max_slowdown=1.8)
    worker = Worker(limits, 10**6, 32, a_machine_that_takes(DECODE_S, token_s=1e-4), allowance=lambda _: 1)
    now = comes_at = longest = 0.0
    for _ in range(1500):
        while comes_at <= now:
            promise = Promise(draw.choice([None, 0.3, 1.0, 10.0]), draw.choice([None, TIGHTEST_S, 0.05, 0.2]))
            num_prompt, num_written = draw.choice([20, 300, 2000, 6000]), draw.randrange(2, 300)
            worker.submit(Simulated(None, 0, num_prompt, 0, num_written, promise), comes_at)
            comes_at += draw.expovariate(3.0)
        step = worker.begin(now)
        if step is None:
            now = comes_at
            continue
        now = step.end
        before_at = {sequence: sequence.last_token_at for sequence, _ in step.grants}
        for sequence, _ in worker.finish():
            if sequence.tpot_s is not None and sequence.num_written > 1:
                gap = (now - before_at[sequence]) / sequence.tpot_s
                mean = (now - sequence.first_token_at) / (sequence.num_written - 1) / sequence.tpot_s
                longest = max(longest, gap)
                assert mean <= 1.0, f"seed {seed}: {mean:.2f} of the promise at {now:.2f} s"
                assert gap <= MAX_STRETCH, f"seed {seed}: a gap of {gap:.2f} at {now:.2f} s"
    assert longest > 1.0, "a first token in danger is never given more than a gap"


# Pauses


def test_less_important_streams_pause_while_their_own_promise_lets_them():
    costs = a_machine_that_takes(decode_s=1e-2, token_s=1e-5)
    important = [decoding(arrival, tpot_s=0.05) for arrival in (1, 2)]
    others = [decoding(arrival, priority=1, tpot_s=1.0) for arrival in (3, 4, 5, 6)]
    made = plan([*important, *others], [], 10, PACED, costs, due=9.0, now=1.0)
    assert made.paused == [5, 6]  # four take 40 ms, and 45 may pass
    made = plan([*important, *others], [], 10, PACED, costs, due=[9.0, 9.0, 9.0, 9.0, 1.01, 9.0], now=1.0)
    assert made.paused == [4, 6]  # whose token is due has it
    assert plan([*important, *others], [], 10, PACED, None, due=9.0, now=1.0).paused == []


def test_whoever_pauses_takes_no_new_block():
    costs = a_machine_that_takes(decode_s=1e-2, token_s=1e-5)
    running = [decoding(1, tpot_s=0.015), decoding(2, priority=1, blocks=1)]
    made = plan(running, [], 10, PACED, costs, due=9.0, now=1.0)
    assert (made.paused, made.grown) == ([2], [])


def test_nobody_pauses_for_an_equal():
    costs = a_machine_that_takes(decode_s=1e-2, token_s=1e-5)
    running = [decoding(arrival, tpot_s=0.015) for arrival in (1, 2, 3)]
    assert plan(running, [], 10, PACED, costs, due=9.0, now=1.0).paused == []


# Displacement


@pytest.mark.parametrize(
    ("due_at", "lets_in"),
    [
        (12.0, False),  # it can still wait for a place
        (10.3, True),  # it comes in time if it begins now, and hardly later
        (10.05, False),  # it is late already; its promise is renewed, and for that one there is time
        (9.3, True),  # and so for each renewal
    ],
)
def test_others_are_put_aside_only_where_it_saves_a_promise(due_at, lets_in):
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-4)
    running = [decoding(1, priority=1, tpot_s=1.0), decoding(2, priority=1, tpot_s=1.0)]
    urgent = newcomer(3, 1000, due_at=due_at, ttft_s=1.0)  # 100 ms of work
    made = plan(running, [urgent], 50, FULL, costs, due=99.0, now=10.0)
    assert (made.admitted, made.paused) == (([3], [2]) if lets_in else ([], []))


def test_without_a_promise_or_without_knowing_costs_the_class_decides():
    running = [decoding(1, priority=1), decoding(2, priority=1)]
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-4)
    assert plan(running, [newcomer(3, 1000, due_at=10.0)], 50, FULL, costs, now=10.0).admitted == [3]
    assert plan(running, [newcomer(3, 1000, due_at=99.0, ttft_s=99.0)], 50, FULL, None, now=10.0).admitted == [3]


def test_one_of_the_same_class_gives_way_only_before_it_writes_and_if_it_can_spare_the_time():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-4)
    urgent = newcomer(9, 1000, due_at=10.3, ttft_s=1.0)

    def admitted(**other):
        last = prefilling(2, 1000, ttft_s=5.0, due_at=15.0)._replace(**other)
        return plan([decoding(1), last], [urgent], 50, FULL, costs, due=99.0, now=10.0).admitted

    assert admitted() == [9]
    assert admitted(has_output=True) == []
    assert admitted(place=(0, 10.35, 2)) == []
    assert admitted(ttft_s=None) == []
    assert admitted(is_immune=True) == []


# Tenants' turns


def steps_of(turns, running, num_steps, costs):
    """Who gets tokens, step by step, as prompts that never end."""
    seen = []
    for _ in range(num_steps):
        turns.begin({party_of(claim) for claim in running})
        made = plan(running, [], 10, PACED, costs, turns=turns)
        by_arrival = {claim.arrival: claim for claim in running}
        for arrival, num_tokens in made.grants:
            claim = by_arrival[arrival]
            turns.charge(party_of(claim), num_tokens, 0, costs, claim.weight)
        seen.append([arrival for arrival, _ in made.grants])
    return seen


def test_tenants_take_turns_with_long_prompts_and_a_tenants_own_go_in_order():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    flood = [prefilling(arrival, 50_000, tenant=b"flood") for arrival in range(4)]
    one = prefilling(9, 50_000, tenant=b"other")
    assert steps_of(Turns(), [*flood, one], 6, costs) == [[0], [9], [0], [9], [0], [9]]


def test_a_tenant_of_twice_the_weight_has_twice_the_turns():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    one = prefilling(1, 50_000, tenant=b"one")
    heavy = prefilling(2, 50_000, tenant=b"heavy", weight=2.0)
    seen = [arrival for step in steps_of(Turns(), [one, heavy], 30, costs) for arrival in step]
    assert (seen.count(1), seen.count(2)) == (10, 20)


def test_of_two_floods_of_short_prompts_the_heavier_has_more_of_one_step():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    turns.begin({(0, b"light"), (0, b"heavy")})
    light = [prefilling(arrival, 256, tenant=b"light") for arrival in range(20)]
    heavy = [prefilling(arrival, 256, tenant=b"heavy", weight=3.0) for arrival in range(20, 40)]
    made = plan([*light, *heavy], [], 99, PACED, costs, turns=turns)
    given = [sum(tokens for arrival, tokens in made.grants if (arrival >= 20) == of_heavy) for of_heavy in (0, 1)]
    assert given == [512, 1536]


def test_whoever_begins_to_ask_has_no_credit_from_before():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    early = prefilling(1, 50_000, tenant=b"early")
    steps_of(turns, [early], 20, costs)
    seen = steps_of(turns, [early, prefilling(2, 50_000, tenant=b"late")], 6, costs)
    assert sorted(arrival for step in seen for arrival in step) == [1, 1, 1, 2, 2, 2]


def test_what_a_tenant_took_while_nobody_else_asked_costs_it_nothing_later():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    often, seldom = prefilling(1, 50_000, tenant=b"often"), prefilling(2, 50_000, tenant=b"seldom")
    steps_of(turns, [often], 20, costs)
    steps_of(turns, [seldom], 1, costs)
    seen = steps_of(turns, [often, seldom], 6, costs)
    assert sorted(arrival for step in seen for arrival in step) == [1, 1, 1, 2, 2, 2]


def test_a_step_without_a_prompt_of_a_tenants_forgives_it_nothing():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    both = {(0, b"flood"), (0, b"other")}
    turns.begin(both)
    turns.charge((0, b"flood"), 50_000, 0, costs)
    owed = turns.served((0, b"flood"))
    turns.begin({(0, b"other")})
    turns.begin(both)
    assert turns.served((0, b"flood")) == owed > turns.served((0, b"other"))


def test_whoever_begins_to_ask_has_no_credit_from_those_who_stand_behind_a_more_important_class():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    early = prefilling(1, 50_000, tenant=b"early")
    behind = prefilling(9, 50_000, priority=1, tenant=b"behind")
    steps_of(turns, [early, behind], 20, costs)
    seen = steps_of(turns, [early, prefilling(2, 50_000, tenant=b"late"), behind], 6, costs)
    assert sorted(arrival for step in seen for arrival in step) == [1, 1, 1, 2, 2, 2]


def test_a_short_prompt_of_another_tenant_is_computed_beside_a_long_one():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    turns.begin({(0, b"flood"), (0, b"other")})
    turns.charge((0, b"flood"), 1000, 0, costs)
    flood = [prefilling(arrival, 5000, tenant=b"flood") for arrival in (1, 2)]
    made = plan(flood, [newcomer(3, 100, tenant=b"other")], 50, PACED, costs, turns=turns)
    assert made.grants == [(3, 100), (1, 1948)]


def test_a_tenant_that_comes_last_has_its_turn_however_many_prompts_of_others_wait():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    turns.begin({(0, b"flood"), (0, b"late")})
    flood = [newcomer(arrival, 128, tenant=b"flood") for arrival in range(1000)]
    late = [newcomer(arrival, 128, tenant=b"late") for arrival in range(1000, 1020)]
    made = plan([], [*flood, *late], 9999, PACED, costs, turns=turns)
    given = [sum(tokens for arrival, tokens in made.grants if (arrival >= 1000) == of_late) for of_late in (0, 1)]
    assert given == [1024, 1024]


def test_a_more_important_class_goes_before_any_turn():
    costs = a_machine_that_takes(decode_s=1e-6, token_s=1e-4)
    turns = Turns()
    turns.begin({(0, b"a"), (1, b"b")})
    turns.charge((0, b"a"), 100_000, 0, costs)
    running = [prefilling(1, 3000, tenant=b"a"), prefilling(2, 3000, priority=1, tenant=b"b")]
    assert plan(running, [], 50, PACED, costs, turns=turns).grants == [(1, 2048)]
