import math

from hypothesis import given
from hypothesis import strategies as st

from policies import batching
from policies.batching import MAX_OVERTAKES, Claim, Limits, limits_of, raised, token_due_at, victims
from policies.batching.room import MAX_PARKED
from policies.settings import Engine
from tests.policies.plans import LIMITS, a_machine_that_takes, decoding, newcomer, plan, prefilling


def test_a_lone_prompt_gets_the_whole_step():
    assert plan([], [newcomer(1, 200)], 10).grants == [(1, 64)]


def test_beside_streams_a_prompt_gets_its_share_and_every_stream_its_token():
    assert plan([decoding(1), decoding(2), prefilling(3, 500)], [], 10).grants == [(1, 1), (2, 1), (3, 16)]


def test_several_prompts_share_a_step():
    made = plan([prefilling(1, 30)], [newcomer(2, 20), newcomer(3, 40)], 10)
    assert made.grants == [(1, 30), (2, 20), (3, 14)]
    assert made.admitted == [2, 3]


def test_nobody_is_admitted_who_would_only_sit_there():
    assert plan([prefilling(1, 100)], [newcomer(2, 20)], 10).admitted == []


def test_a_prompt_that_waits_for_another_to_compute_its_beginning_takes_no_tokens():
    made = plan([], [newcomer(1, 30), newcomer(2, 0), newcomer(3, 10)], 10)
    assert (made.admitted, made.grants) == ([1, 2, 3], [(1, 30), (3, 10)])


def test_places_of_which_nobody_makes_use_are_lent_until_they_are_wanted_again():
    idle = [Claim((0, 0.0, arrival), 0, has_output=True, is_idle=True) for arrival in range(1, 5)]
    made = plan(idle, [newcomer(arrival, 5) for arrival in range(5, 11)], 50)
    assert (made.admitted, made.paused) == ([5, 6, 7, 8], [])
    assert len(idle) + len(made.admitted) == MAX_PARKED * LIMITS.max_sequences
    assert plan([*idle, *map(decoding, range(5, 9))], [newcomer(9, 5)], 50).admitted == []
    again = plan([decoding(1), *idle[1:], *map(decoding, range(5, 9))], [], 50)
    assert (again.grants, again.paused) == ([(1, 1), (5, 1), (6, 1), (7, 1)], [8])


def test_a_more_important_prompt_is_computed_before_one_already_begun():
    made = plan([prefilling(1, 100, priority=5)], [newcomer(2, 50, priority=0)], 10)
    assert made.grants == [(2, 50), (1, 14)]


def test_a_prompt_that_is_due_sooner_is_computed_before_an_earlier_one():
    made = plan([prefilling(1, 100)._replace(place=(0, 9.0, 1))], [newcomer(2, 50, due_at=5.0)], 10)
    assert made.grants == [(2, 50), (1, 14)]


def test_where_steps_have_fewer_tokens_than_streams_a_more_important_prompt_has_half_of_them():
    limits = Limits(max_step_tokens=4, max_prefill_tokens_beside_decodes=16, max_sequences=8)
    running = [decoding(1), *[decoding(arrival, priority=5) for arrival in range(2, 7)]]
    made = plan(running, [newcomer(9, 20)], 50, limits)
    assert (made.grants, made.paused) == ([(1, 1), (2, 1), (9, 2)], [3, 4, 5, 6])
    assert plan(running, [newcomer(9, 20, priority=5)], 50, limits).grants == [(1, 1), (2, 1), (3, 1), (4, 1)]
    single = Limits(max_step_tokens=1, max_prefill_tokens_beside_decodes=16, max_sequences=8)
    assert plan(running[1:], [newcomer(9, 20)], 50, single).grants == [(2, 1)]


def test_there_are_fewer_places_than_tokens_so_prefill_always_has_a_share():
    assert limits_of(Engine(max_sequences=256, max_step_tokens=100)).max_sequences == 99
    assert limits_of(Engine(max_sequences=256, max_step_tokens=1)).max_sequences == 1
    assert limits_of(Engine(max_sequences=8)).max_sequences == 8


# Blocks


def test_when_blocks_run_out_the_last_in_order_loses_its_end_and_no_more():
    made = plan([decoding(1, blocks=1), decoding(2, blocks=1), decoding(3)], [], 1, frees=5)
    assert (made.cut, made.preempted, made.paused) == ([(3, 1)], [], [3])
    assert (made.grown, made.grants) == ([1, 2], [(1, 1), (2, 1)])


def test_who_has_nothing_left_goes_back_among_those_who_wait():
    made = plan([decoding(1, blocks=1), decoding(2, blocks=1), decoding(3)], [], 1, frees=1)
    assert (made.cut, made.preempted, made.paused) == ([], [3], [])


def test_whoever_lacks_a_block_and_is_last_pauses_and_keeps_what_it_has():
    made = plan([decoding(1), decoding(2, blocks=1)], [], 0)
    assert (made.cut, made.preempted, made.paused, made.grants) == ([], [], [2], [(1, 1)])


def test_among_equals_one_that_may_wait_pauses_before_another_loses_anything():
    running = [decoding(1), decoding(2, blocks=1), decoding(3)]
    assert plan(running, [], 0, frees=5, due=[0.0, 9.0, 0.0], now=5.0).paused == [2]
    assert plan(running, [], 0, frees=5, due=[0.0, 4.0, 0.0], now=5.0).cut == [(3, 1)]
    less_important = [*running[:2], decoding(3, priority=1)]
    assert plan(less_important, [], 0, frees=5, due=[0.0, 9.0, 0.0], now=5.0).cut == [(3, 1)]


def test_one_that_was_put_back_often_is_spared_but_not_by_the_first_of_all():
    running = [decoding(1), decoding(2, blocks=1), decoding(3, is_immune=True)]
    assert plan(running, [], 0, frees=5).cut == []
    assert plan([running[0], running[1], decoding(3), running[2]._replace(place=(0, 0.0, 4))], [], 0, frees=5).cut == [
        (3, 1)
    ]
    assert plan(running[1:], [], 0, frees=5).cut == [(3, 1)]


def test_among_equals_the_one_that_computes_its_blocks_again_soonest_loses_its_end():
    costs = a_machine_that_takes(decode_s=1e-4, token_s=1e-5, pair_s=1e-8)
    short, long = decoding(2, start=500), decoding(3, start=9000)
    assert plan([decoding(1, blocks=1), short, long], [], 0, costs=costs, frees=5).cut == [(2, 1)]
    assert plan([decoding(1, blocks=1), short, long], [], 0, frees=5).cut == [(3, 1)]
    begun = prefilling(2, 8000, start=1000)
    assert plan([decoding(1, blocks=1), begun, decoding(3, start=500)], [], 0, costs=costs, frees=5).cut == [(2, 1)]
    # A little less is no reason to go out of turn, and a less important one goes before any other.
    alike = [decoding(1, blocks=1), decoding(2, start=500), decoding(3, start=510)]
    assert plan(alike, [], 0, costs=costs, frees=5).cut == [(3, 1)]
    lower = [decoding(1, blocks=1), decoding(2, start=500), decoding(3, priority=1, start=9000)]
    assert plan(lower, [], 0, costs=costs, frees=5).cut == [(3, 1)]


def test_one_that_gives_all_it_has_for_itself_keeps_what_it_shares():
    running = [decoding(1, blocks=2), decoding(2), decoding(3)]
    alone, sharing = (plan(running, [], 0, frees=2, num_shared=num_shared) for num_shared in (0, 3))
    assert (alone.preempted, alone.cut) == ([3], [])
    assert (sharing.preempted, sharing.cut) == ([], [(3, 2)])
    sharing = plan(running, [], 0, frees=1, num_shared=3)
    assert (sharing.preempted, sharing.cut) == ([3], [(2, 1)])


def test_nobody_takes_from_one_before_it_however_cheap_that_were():
    costs = a_machine_that_takes(decode_s=1e-4, token_s=1e-5, pair_s=1e-8)
    running = [decoding(1), decoding(2, start=10), decoding(3, blocks=1, start=100), decoding(4, start=9000)]
    assert plan(running, [], 0, costs=costs, frees=5).cut == [(4, 1)]


def test_what_was_lost_comes_back_when_a_block_for_each_other_is_left():
    running = [decoding(1), decoding(2), Claim((0, 0.0, 3), 70, 3, has_output=True)]
    assert plan(running, [], 4).paused == [3]
    made = plan(running, [], 5)
    assert (made.grown, made.grants) == ([3], [(1, 1), (2, 1), (3, 16)])


def test_nobody_joins_in_a_step_in_which_somebody_lost_blocks():
    assert plan([decoding(1, blocks=1), decoding(2)], [newcomer(3, 5)], 0, frees=9).admitted == []


def test_nobody_joins_before_those_who_wait_for_their_blocks():
    running = [decoding(1), Claim((1, 0.0, 3), 70, 9, has_output=True)]
    assert plan(running, [newcomer(4, 5, priority=1)], 5).admitted == []
    assert plan(running, [newcomer(4, 5, priority=0)], 5).admitted == [4]


def test_a_newcomer_leaves_a_block_for_everyone_to_grow_into():
    running = [decoding(1), decoding(2)]
    assert plan(running, [newcomer(3, 8, blocks=3)], 4).admitted == []
    assert plan(running, [newcomer(3, 8, blocks=3)], 5).admitted == [3]
    assert plan([], [newcomer(3, 8, blocks=3)], 3).admitted == [3]


def test_blocks_that_are_shared_with_running_sequences_need_no_room():
    assert plan([decoding(1)], [newcomer(2, 8, blocks=9, shared=7)], 3).admitted == [2]


def test_blocks_that_one_newcomer_shares_are_not_freed_for_the_next_by_displacing_their_holder():
    running = [decoding(9, priority=5)]
    waiting = [newcomer(1, 8, blocks=9, shared=7), newcomer(2, 8, blocks=6)]
    assert plan(running, waiting, 5, frees=7).admitted == [1]
    made = plan(running, waiting, 9, frees=7)
    assert (made.preempted, made.admitted, made.grants) == ([9], [1, 2], [(1, 8), (2, 8)])


# Room for newcomers


def test_a_full_batch_makes_room_for_higher_priority_only_and_whoever_gives_way_keeps_its_blocks():
    running = [decoding(arrival, priority=1) for arrival in (1, 2, 3, 4)]
    assert plan(running, [newcomer(5, 9, priority=1)], 50).admitted == []
    made = plan(running, [newcomer(5, 9, priority=0)], 50)
    assert (made.preempted, made.cut, made.paused, made.admitted) == ([], [], [4], [5])
    assert (made.grants, made.num_displacing) == ([(1, 1), (2, 1), (3, 1), (5, 9)], 1)


def test_who_pauses_for_want_of_a_place_goes_on_when_there_is_one_and_before_newcomers():
    running = [decoding(1), decoding(2), decoding(3), decoding(4, priority=1), decoding(5, priority=1)]
    assert plan(running, [], 50).paused == [5]
    assert plan(running, [newcomer(6, 9, priority=1)], 50).admitted == []
    assert plan(running[1:], [newcomer(6, 9, priority=1)], 50).paused == []


def test_no_more_pause_for_want_of_a_place_than_there_are_places():
    running = [decoding(arrival, priority=1) for arrival in range(1, 9)]
    assert plan(running, [newcomer(9, 9)], 50).admitted == []
    made = plan(running[:7], [newcomer(9, 9)], 50)
    assert (made.admitted, made.paused) == ([9], [4, 5, 6, 7])


def test_places_are_made_of_those_alone_who_may_be_put_aside():
    prompt = newcomer(5, 9, priority=5, slots=2)
    assert plan([decoding(1), decoding(2), decoding(3), decoding(4, priority=9)], [prompt], 50).admitted == []
    made = plan([decoding(1), decoding(2), decoding(3, priority=9), decoding(4, priority=9)], [prompt], 50)
    assert (made.admitted, made.paused) == ([5], [3, 4])


def test_one_that_was_put_back_often_keeps_its_place_before_the_others():
    running = [decoding(1), decoding(2), decoding(3), decoding(4), decoding(5, is_immune=True)]
    assert plan(running, [], 50).paused == [4]


def test_nobody_is_displaced_in_vain():
    running = [decoding(1, priority=0), decoding(2, priority=9)]
    made = plan(running, [newcomer(3, 50, priority=5, blocks=4)], 0, frees=[5, 2])
    assert (made.preempted, made.cut, made.admitted) == ([], [], [])


def test_for_memory_a_less_important_one_loses_only_what_is_lacking():
    made = plan([decoding(1), decoding(2, priority=9)], [newcomer(3, 50, blocks=4)], 3, frees=9)
    assert (made.cut, made.admitted, made.paused) == ([(2, 3)], [3], [2])


def test_one_that_does_not_fit_is_overtaken_only_so_often_and_then_what_falls_free_is_kept():
    running = [decoding(1)]
    waiting = [newcomer(2, 50, blocks=9), newcomer(3, 2, blocks=1)]
    made = plan(running, waiting, 5)
    assert (made.admitted, made.overtaken) == ([3], [2])
    waiting[0] = waiting[0]._replace(num_overtaken=MAX_OVERTAKES)
    made = plan(running, waiting, 5)
    assert (made.admitted, made.overtaken) == ([], [])


def test_nobody_waits_for_a_beginning_that_one_computes_who_did_not_fit():
    assert plan([decoding(1)], [newcomer(2, 50, blocks=9), newcomer(3, 0, blocks=1)], 5).admitted == []


def test_nobody_gives_way_to_one_who_only_waits_for_a_beginning():
    turns = batching.Turns()
    turns.begin({(0, b""), (0, b"y")})
    turns.charge((0, b""), 1, 0, None)
    costs = a_machine_that_takes(decode_s=1e-3, token_s=1e-3)
    running = [prefilling(1, 64, ttft_s=1.0, due_at=1.1), prefilling(2, 64, tenant=b"y", ttft_s=60.0, due_at=60.0)]
    waiting = [newcomer(3, 0, ttft_s=1.0, due_at=1.1)]
    made = plan(running, waiting, 50, Limits(64, 16, max_sequences=2), costs, turns=turns, now=0.9)
    assert (made.admitted, made.grants) == ([], [(2, 64)])


def test_a_prompt_that_will_fork_takes_the_places_of_its_forks():
    assert plan([decoding(1)], [newcomer(2, 8, slots=4)], 50).admitted == []
    assert plan([decoding(1)], [newcomer(2, 8, slots=3), newcomer(3, 8)], 50).admitted == [2]
    assert plan([], [newcomer(2, 8, slots=9)], 50).admitted == [2]


# All situations


@st.composite
def situations(draw):
    arrivals = draw(st.permutations(range(24)))
    limits = Limits(
        max_step_tokens=draw(st.integers(8, 64)),
        max_prefill_tokens_beside_decodes=draw(st.integers(1, 32)),
        max_sequences=draw(st.integers(1, 7)),
        max_slowdown=draw(st.sampled_from([0.0, 1.8])),
    )

    def place(arrival):
        return draw(st.integers(0, 2)), draw(st.sampled_from([-1.0, 0.0, 1.0, 50.0])), arrival

    def promises():
        ttft_s, tpot_s = draw(st.sampled_from([None, 1.0, 60.0])), draw(st.sampled_from([None, 0.01, 0.1, 1.0]))
        return {"ttft_s": ttft_s, "tpot_s": tpot_s, "tenant": draw(st.sampled_from([b"", b"x"]))}

    running = sorted(
        Claim(
            place=place(arrival),
            num_pending=(num_pending := draw(st.sampled_from([0, 1, 1, 1, 2, 7, 100]))),
            num_new_blocks=draw(st.sampled_from([0, 0, 1] if num_pending == 1 else [0, 0, 0, 3])),
            has_output=num_pending == 1 or draw(st.booleans()),
            is_immune=draw(st.sampled_from([False, False, True])),
            **promises(),
        )
        for arrival in arrivals[: draw(st.integers(0, min(12, MAX_PARKED * limits.max_sequences)))]
    )
    if running:  # whoever is first waits for nobody
        running[0] = running[0]._replace(num_pending=max(1, running[0].num_pending))
    waiting = sorted(
        Claim(
            place=place(arrival),
            num_pending=draw(st.sampled_from([0, 0, 1, 2, 7, 30, 100])),
            num_new_blocks=draw(st.integers(1, 8)),
            num_slots=draw(st.sampled_from([1, 1, 3])),
            num_shared_blocks=draw(st.sampled_from([0, 0, 1])),
            num_overtaken=draw(st.sampled_from([0, MAX_OVERTAKES])),
            **promises(),
        )
        for arrival in arrivals[12 : 12 + draw(st.integers(0, 8))]
    )
    frees = [draw(st.integers(1, 5)) for _ in running]
    due = [draw(st.sampled_from([-math.inf, 0.0, 5.0])) for _ in running]
    costs = draw(st.sampled_from([None, a_machine_that_takes(5e-3, 1e-4)]))
    turns = batching.Turns()
    turns.begin({batching.party_of(claim) for claim in running + waiting})
    return running, waiting, draw(st.integers(0, 12)), limits, costs, frees, due, turns


@given(situations())
def test_every_plan_keeps_its_promises(situation):
    running, waiting, available, limits, costs, frees, due, turns = situation
    made = plan(running, waiting, available, limits, costs, frees, due, turns=turns, now=1.0)
    by_arrival = {claim.arrival: claim for claim in running + waiting}
    index_of = {claim.arrival: index for index, claim in enumerate(running)}
    granted = dict(made.grants)
    gone, cut, idle = set(made.preempted), dict(made.cut), set(made.paused)
    staying = [claim for claim in running if claim.arrival not in gone]
    admitted = [by_arrival[arrival] for arrival in made.admitted]

    # budgets
    assert sum(granted.values()) <= limits.max_step_tokens
    decoding_on = {claim.arrival for claim in staying if claim.num_pending == 1 and claim.arrival in granted}
    num_prefill_tokens = sum(n for arrival, n in made.grants if arrival not in decoding_on)
    if decoding_on and not made.num_displacing:
        assert num_prefill_tokens <= limits.max_prefill_tokens_beside_decodes
    assert all(1 <= n <= by_arrival[arrival].num_pending for arrival, n in made.grants)
    assert len(granted) == len(made.grants)
    assert not granted.keys() & (gone | cut.keys() | idle)

    # places: only one that forks wider than the batch may ask for more than there are
    num_places = sum(min(by_arrival[arrival].num_slots, limits.max_sequences) for arrival in granted)
    assert num_places <= limits.max_sequences

    # blocks: what is promised is there
    freed = sum(frees[index_of[arrival]] for arrival in gone) + sum(cut.values())
    displaced_for_memory = bool(gone or cut) and bool(admitted)
    wanted = sum(by_arrival[arrival].num_new_blocks for arrival in made.grown) + sum(
        # whoever is displaced may have held what others were to share
        claim.num_new_blocks - (0 if displaced_for_memory else claim.num_shared_blocks)
        for claim in admitted
    )
    assert wanted <= available + freed
    assert all(0 < num_blocks < frees[index_of[arrival]] for arrival, num_blocks in cut.items())
    assert not set(made.grown) & (gone | cut.keys())
    for arrival in granted.keys() & index_of:
        assert by_arrival[arrival].num_new_blocks == 0 or arrival in made.grown

    # the first of all moves, or the prompt whose tenant's turn it is; and whoever stands still is named
    if running and running[0].num_new_blocks <= available + sum(frees[1:]):
        is_full = limits.max_step_tokens <= len(decoding_on)
        is_others_turn = running[0].num_pending > 1 and (is_full or num_prefill_tokens)
        assert granted, "there is work, and none of it is done"
        assert admitted or running[0].arrival in granted or is_others_turn
    still = {claim.arrival for claim in staying if claim.num_pending == 1} - granted.keys()
    assert still <= idle
    assert idle <= index_of.keys()

    # whoever loses anything comes after whoever gains by it; the immune lose only to the first of all
    losers = sorted((gone | cut.keys()), key=index_of.__getitem__)
    if losers:
        winners = admitted or [by_arrival[arrival] for arrival in made.grown]
        assert min(claim.place for claim in winners) < by_arrival[losers[0]].place
        for arrival in losers:
            assert not by_arrival[arrival].is_immune or running[0].arrival in made.grown
        last = victims(running)
        assert set(map(index_of.__getitem__, losers)) <= set(last[: len(last) - bool(not admitted)])
    assert made.num_displacing <= sum(claim.place < running[-1].place for claim in admitted if running)


def test_a_token_is_due_by_the_mean_but_no_gap_is_meant_to_be_very_long():
    assert token_due_at(0.1, 10.0, 10.3, 4) == 10.4
    assert token_due_at(0.1, 10.0, 10.3, 4000) == 11.3
    assert token_due_at(None, 10.0, 10.3, 4) == token_due_at(0.1, None, 10.3, 0) == -math.inf


def test_who_stands_still_for_long_becomes_more_important_and_never_more_than_the_first():
    place = (2, 100.0, 7)
    assert raised(place, 2, None, 0.0, 120.0) == place
    assert raised(place, 2, None, 0.0, 131.0) == (1, 100.0, 7)
    assert raised(place, 2, 600.0, 0.0, 131.0) == place
    assert raised(place, 2, None, 120.0, 131.0) == place  # it had a token a moment ago
    assert raised(place, 2, None, 0.0, 10_000.0) == (0, 100.0, 7)
    assert raised((1, 100.0, 7), 2, None, 9_999.0, 10_000.0) == (1, 100.0, 7)
