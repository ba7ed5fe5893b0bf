from hypothesis import given
from hypothesis import strategies as st

from policies.batching import MIN_CHUNK, Claim, Limits, limits_of, plan
from policies.costs import StepCosts, Work, pairs
from policies.settings import Engine

LIMITS = Limits(max_step_tokens=64, max_prefill_tokens_beside_decodes=16, max_sequences=4)


def decoding(arrival, priority=0, blocks=0, frees=1):
    return Claim(priority, arrival, 1, blocks, frees)


def prefilling(arrival, tokens, priority=0, frees=4, slots=1):
    return Claim(priority, arrival, tokens, 0, frees, slots)


def newcomer(arrival, tokens, priority=0, blocks=1, slots=1, shared=0):
    return Claim(priority, arrival, tokens, blocks, 0, slots, shared)


def test_a_lone_prompt_gets_the_whole_step():
    assert plan([], [newcomer(1, 200)], 10, LIMITS).grants == [(1, 64)]


def test_beside_streams_a_prompt_gets_its_share_and_every_stream_its_token():
    assert plan([decoding(1), decoding(2), prefilling(3, 500)], [], 10, LIMITS).grants == [(1, 1), (2, 1), (3, 16)]


def test_several_prompts_share_a_step():
    made = plan([prefilling(1, 30)], [newcomer(2, 20), newcomer(3, 40)], 10, LIMITS)
    assert made.grants == [(1, 30), (2, 20), (3, 14)]
    assert made.admitted == [2, 3]


def test_nobody_is_admitted_who_would_only_sit_there():
    assert plan([prefilling(1, 100)], [newcomer(2, 20)], 10, LIMITS).admitted == []


def test_a_prompt_that_waits_for_another_to_compute_its_beginning_takes_no_tokens():
    assert plan([], [newcomer(1, 30), newcomer(2, 0), newcomer(3, 10)], 10, LIMITS) == (
        [],
        [1, 2, 3],
        [(1, 30), (3, 10)],
    )


def test_a_more_important_prompt_is_computed_before_one_already_begun():
    made = plan([prefilling(1, 100, priority=5)], [newcomer(2, 50, priority=0)], 10, LIMITS)
    assert made.grants == [(2, 50), (1, 14)]


def test_when_blocks_run_out_the_last_in_order_gives_way():
    made = plan([decoding(1, blocks=1), decoding(2, blocks=1), decoding(3)], [], 1, LIMITS)
    assert made == ([3], [], [(1, 1), (2, 1)])


def test_whoever_lacks_a_block_and_is_last_gives_way_itself():
    assert plan([decoding(1), decoding(2, blocks=1)], [], 0, LIMITS) == ([2], [], [(1, 1)])


def test_nobody_joins_in_a_step_in_which_blocks_ran_out():
    assert plan([decoding(1, blocks=1), decoding(2, frees=9)], [newcomer(3, 5)], 0, LIMITS).admitted == []


def test_a_full_batch_makes_room_for_higher_priority_only():
    running = [decoding(arrival, priority=1) for arrival in (1, 2, 3, 4)]
    assert plan(running, [newcomer(5, 9, priority=1)], 50, LIMITS).preempted == []
    made = plan(running, [newcomer(5, 9, priority=0)], 50, LIMITS)
    assert (made.preempted, made.admitted) == ([4], [5])
    assert made.grants == [(1, 1), (2, 1), (3, 1), (5, 9)]


def test_nobody_is_displaced_in_vain():
    running = [decoding(1, priority=0, frees=5), decoding(2, priority=9, frees=2)]
    assert plan(running, [newcomer(3, 50, priority=5, blocks=4)], 0, LIMITS).preempted == []


def test_a_newcomer_leaves_a_block_for_everyone_to_grow_into():
    running = [decoding(1), decoding(2)]
    assert plan(running, [newcomer(3, 8, blocks=3)], 4, LIMITS).admitted == []
    assert plan(running, [newcomer(3, 8, blocks=3)], 5, LIMITS).admitted == [3]
    assert plan([], [newcomer(3, 8, blocks=3)], 3, LIMITS).admitted == [3]


def test_blocks_that_are_shared_with_running_sequences_need_no_room():
    assert plan([decoding(1)], [newcomer(2, 8, blocks=9, shared=7)], 3, LIMITS).admitted == [2]


def test_blocks_that_one_newcomer_shares_are_not_freed_for_the_next_by_displacing_their_holder():
    running = [decoding(9, priority=5, frees=7)]
    waiting = [newcomer(1, 8, blocks=9, shared=7), newcomer(2, 8, blocks=6)]
    assert plan(running, waiting, 5, LIMITS).admitted == [1]
    assert plan(running, waiting, 9, LIMITS) == ([9], [1, 2], [(1, 8), (2, 8)])


def test_nobody_overtakes_one_that_waits_for_blocks():
    made = plan([decoding(1)], [newcomer(2, 50, blocks=9), newcomer(3, 2, blocks=1)], 5, LIMITS)
    assert made.admitted == []


def test_a_prompt_that_will_fork_takes_the_places_of_its_forks():
    assert plan([decoding(1)], [newcomer(2, 8, slots=4)], 50, LIMITS).admitted == []
    assert plan([decoding(1)], [newcomer(2, 8, slots=3), newcomer(3, 8)], 50, LIMITS).admitted == [2]
    assert plan([], [newcomer(2, 8, slots=9)], 50, LIMITS).admitted == [2]


def test_there_are_fewer_places_than_tokens_so_prefill_always_has_a_share():
    assert limits_of(Engine(max_sequences=256, max_step_tokens=100)).max_sequences == 99
    assert limits_of(Engine(max_sequences=256, max_step_tokens=1)).max_sequences == 1
    assert limits_of(Engine(max_sequences=8)).max_sequences == 8


@st.composite
def situations(draw):
    arrivals = draw(st.permutations(range(24)))
    limits = Limits(
        max_step_tokens=draw(st.integers(8, 64)),
        max_prefill_tokens_beside_decodes=draw(st.integers(1, 32)),
        max_sequences=draw(st.integers(1, 7)),
    )
    running = sorted(
        Claim(
            priority=draw(st.integers(0, 2)),
            arrival=arrival,
            num_pending=draw(st.sampled_from([0, 1, 1, 2, 7, 100])),
            num_new_blocks=draw(st.sampled_from([0, 0, 1])),
            num_freed_blocks=draw(st.integers(1, 5)),
        )
        for arrival in arrivals[: draw(st.integers(0, limits.max_sequences))]
    )
    waiting = sorted(
        Claim(
            priority=draw(st.integers(0, 2)),
            arrival=arrival,
            num_pending=draw(st.integers(0, 100)),
            num_new_blocks=draw(st.integers(1, 8)),
            num_slots=draw(st.sampled_from([1, 1, 3])),
            num_shared_blocks=draw(st.sampled_from([0, 0, 1])),
        )
        for arrival in arrivals[12 : 12 + draw(st.integers(0, 8))]
    )
    return running, waiting, draw(st.integers(0, 12)), limits


@given(situations())
def test_every_plan_keeps_its_promises(situation):
    running, waiting, available, limits = situation
    made = plan(running, iter(waiting), available, limits)
    by_arrival = {claim.arrival: claim for claim in running + waiting}
    granted = dict(made.grants)
    gone = set(made.preempted)
    staying = [claim for claim in running if claim.arrival not in gone]
    admitted = [by_arrival[arrival] for arrival in made.admitted]

    # budgets
    assert sum(granted.values()) <= limits.max_step_tokens
    decoding_on = {claim.arrival for claim in staying if claim.num_pending == 1}
    num_prefill_tokens = sum(n for arrival, n in made.grants if arrival not in decoding_on)
    if decoding_on:
        assert num_prefill_tokens <= limits.max_prefill_tokens_beside_decodes
    assert all(1 <= n <= by_arrival[arrival].num_pending for arrival, n in made.grants)
    assert len(granted) == len(made.grants)
    assert not granted.keys() & gone

    # places: only one that forks wider than the batch may ask for more than there are
    assert sum(min(claim.num_slots, limits.max_sequences) for claim in staying + admitted) <= limits.max_sequences

    # blocks: what is promised is there
    freed = sum(claim.num_freed_blocks for claim in running if claim.arrival in gone)
    wanted = sum(claim.num_new_blocks for claim in staying) + sum(
        # whoever is displaced may have held what others were to share
        claim.num_new_blocks - (0 if gone else claim.num_shared_blocks)
        for claim in admitted
    )
    assert wanted <= available + freed

    # every stream that stays moves, and the first of all that may compute does
    assert all(granted.get(claim.arrival) == 1 for claim in staying if claim.num_pending == 1)
    wishing = sorted(claim for claim in staying + admitted if claim.num_pending)
    assert not wishing or wishing[0].arrival in granted

    # only the last in order give way; for a newcomer, only to a strictly more important one
    assert staying == running[: len(staying)]
    assert admitted == waiting[: len(admitted)]
    if admitted and gone:
        assert min(claim.priority for claim in admitted) < min(by_arrival[arrival].priority for arrival in gone)


def a_machine_that_takes(decode_s, token_s, pair_s=0.0):
    """Fitted on a noiseless machine: decode_s a step for each decode, token_s and pair_s for prompts."""
    costs = StepCosts()
    for turn in range(400):
        decodes, chunk, start = turn % 5, 32 * (turn % 7), 500 * (turn % 3)
        if decodes or chunk:
            work = Work(chunk, decodes, 0, pairs(chunk, start))
            costs.observe(work, 1e-4 + decode_s * decodes + token_s * chunk + pair_s * pairs(chunk, start))
    return costs


PACED = Limits(max_step_tokens=2048, max_prefill_tokens_beside_decodes=1024, max_sequences=64, max_slowdown=2.0)


def test_prompts_may_take_as_long_as_the_streams_beside_them():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5)
    made = plan([decoding(1), decoding(2), prefilling(3, 5000)], [], 10, PACED, costs)
    (_, num_tokens) = made.grants[-1]
    assert 180 <= num_tokens <= 230  # 2.1 ms of decodes, so 2.1 ms for the prompt, at 10 us a token


def test_a_burst_of_prompts_gets_the_longer_share_beside_few_streams():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-4)

    def num_tokens(num_decodes, num_waiting):
        running = [*map(decoding, range(num_decodes)), prefilling(99, 5000)]
        return plan(running, [], 10, PACED, costs, num_waiting=num_waiting).grants[-1][1]

    assert num_tokens(1, 0) < 20
    assert 75 <= num_tokens(8, 0) <= 85
    assert 75 <= num_tokens(8, 1) <= 85
    assert 230 <= num_tokens(8, 3) <= 250


def test_the_farther_into_a_prompt_the_shorter_its_chunks():
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-5, pair_s=1e-8)
    chunks = []
    for start in (0, 1000, 4000, 16000):
        claim = prefilling(3, 5000)._replace(start=start)
        chunks.append(plan([decoding(1), claim], [], 10, PACED, costs).grants[-1][1])
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
