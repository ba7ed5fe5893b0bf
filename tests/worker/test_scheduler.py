"""Who pauses, who loses what and who goes first: the plan carried out, on the device that knows what it should read."""

import itertools

import pytest

from policies.batching import MAX_OVERTAKES
from policies.costs import StepCosts
from tests.worker.engine_bench import Bench, expected, tokens
from tests.worker.scripted import ScriptedRunner


def stats_of(bench):
    return bench.engine.stats()


def test_one_that_lost_its_end_computes_only_that_again_and_gives_the_same_answer():
    bench = Bench(ScriptedRunner(num_blocks=12, overlaps=False), prefix_cache=False)
    bench.submit("a", tokens(12), max_tokens=20)
    bench.submit("b", tokens(12, 20), max_tokens=20)
    bench.run()
    stats = stats_of(bench)
    assert (stats.num_preemptions, stats.num_tail_frees) == (0, 1)
    assert stats.num_prefill_tokens < 24 + 12  # b's 23 tokens were not all computed again
    assert bench.finishes["b", 0].num_preemptions == 1
    for name, first in (("a", 1), ("b", 20)):
        assert bench.answers[name, 0] == expected(tokens(12, first), 20)


def test_what_was_lost_is_found_again_if_nobody_took_it():
    bench = Bench(ScriptedRunner(num_blocks=12))
    bench.submit("a", tokens(12), max_tokens=20)
    bench.submit("b", tokens(12, 20), max_tokens=20)
    while not stats_of(bench).num_tail_frees:
        bench.step()
    num_prefill_tokens = stats_of(bench).num_prefill_tokens
    bench.cancel("a")
    bench.run()
    assert stats_of(bench).num_prefill_tokens - num_prefill_tokens <= 5
    assert bench.answers["b", 0] == expected(tokens(12, 20), 20)


def test_whoever_pauses_for_want_of_a_place_keeps_its_blocks():
    bench = Bench(max_sequences=1)
    bench.submit("a", tokens(12), max_tokens=20, priority=1)
    for _ in range(3):
        bench.step()
    num_used = stats_of(bench).num_used_blocks
    bench.submit("urgent", tokens(12, 30), max_tokens=3)
    for _ in range(3):
        assert bench.step() == {"urgent"}
        assert stats_of(bench).num_paused == 1
    assert stats_of(bench).num_used_blocks == num_used
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(12), 20)
    assert stats_of(bench).num_prefill_tokens == 24


def test_the_place_of_an_answer_is_not_taken_for_a_promise_that_is_kept_anyway():
    bench = Bench(max_sequences=1)
    bench.engine._costs = StepCosts.of((0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    bench.submit("a", tokens(12), max_tokens=20, priority=1)
    bench.step()
    bench.submit("patient", tokens(12, 30), max_tokens=3, promise={"ttft_s": 60.0})
    bench.run()
    assert list(bench.finishes) == [("a", 0), ("patient", 0)]
    assert stats_of(bench).num_displacements == 0


def test_siblings_that_pause_lose_the_block_they_share_when_another_writes_in_it():
    bench = Bench(ScriptedRunner(num_blocks=4), max_preemptions=9)
    bench.submit("a", tokens(10), seed=7, num_sequences=4)
    bench.run()
    for index in range(4):
        assert bench.answers["a", index] == expected(tokens(10), seed=7 + index)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_sibling_all_of_whose_own_blocks_are_wanted_keeps_those_it_shares(prefix_cache):
    bench = Bench(ScriptedRunner(num_blocks=4, overlaps=False), prefix_cache=prefix_cache)
    bench.submit("a", tokens(8), seed=7, num_sequences=2, max_tokens=7)
    bench.run()
    stats = stats_of(bench)
    assert (stats.num_preemptions, stats.num_tail_frees) == (0, 1)
    assert stats.num_prefill_tokens == 8 + 5  # the prompt once, and what lay in its one block
    for index in range(2):
        assert bench.answers["a", index] == expected(tokens(8), 7, seed=7 + index)


@pytest.mark.parametrize("max_preemptions", [0, 1, 2])
def test_a_sequence_is_put_back_only_so_often_for_others(max_preemptions):
    bench = Bench(ScriptedRunner(num_blocks=24), max_preemptions=max_preemptions, prefix_cache=False)
    bench.submit("first", tokens(40), max_tokens=40)
    bench.submit("low", tokens(30, 5), max_tokens=20, priority=5)
    for _ in range(3):
        bench.step()
    for number in range(6):
        bench.submit(f"urgent {number}", tokens(20, 7 + number), max_tokens=2, priority=0)
        for _ in range(4):
            bench.step()
    bench.run()
    # The first of all takes what it must, from the immune as well; nobody else does.
    assert bench.finishes["low", 0].num_preemptions <= max_preemptions + 1
    assert bench.answers["low", 0] == expected(tokens(30, 5), 20)


def test_one_whose_last_token_is_still_to_be_read_gives_up_blocks_and_is_not_put_back():
    bench = Bench(ScriptedRunner(num_blocks=12, overlaps=True), max_preemptions=0)
    bench.submit("ends", tokens(40), max_tokens=4, priority=5)
    for _ in range(4):
        bench.step()
    bench.submit("urgent", tokens(30, 5), max_tokens=2)
    bench.step()
    assert stats_of(bench).num_displacements == 1
    bench.run()
    assert bench.answers["ends", 0] == expected(tokens(40), 4)
    assert bench.finishes["ends", 0].num_preemptions == 0


def test_a_tenants_flood_of_long_prompts_does_not_hold_up_anothers_short_one():
    bench = Bench(ScriptedRunner(num_blocks=256), max_step_tokens=16)
    for number in range(4):
        bench.submit(f"long {number}", tokens(200, number), promise={"tenant": b"flood"})
    for _ in range(4):
        bench.step()
    bench.submit("short", tokens(10, 30), promise={"tenant": b"other"})
    for _ in range(3):
        moved = bench.step()
    assert "short" in moved or ("short", 0) in bench.answers
    bench.run()
    assert next(iter(bench.finishes)) == ("short", 0)


def test_a_small_request_goes_past_one_that_does_not_fit():
    bench = Bench(ScriptedRunner(num_blocks=20))
    bench.submit("running", tokens(40), max_tokens=30)
    bench.step()
    bench.submit("large", tokens(44, 9), max_tokens=2)
    bench.submit("small", tokens(4, 20), max_tokens=2)
    bench.run()
    assert [name for name, _ in bench.finishes] == ["small", "running", "large"]
    assert bench.answers["large", 0] == expected(tokens(44, 9), 2)


def test_small_requests_go_past_a_large_one_only_so_often():
    bench = Bench(ScriptedRunner(num_blocks=20))
    bench.submit("running", tokens(40), max_tokens=30)
    bench.step()
    bench.submit("large", tokens(44, 9), max_tokens=2)
    for number in range(2 * MAX_OVERTAKES):
        bench.submit(f"small {number}", tokens(4, 20 + number), max_tokens=2)
    bench.run()
    order = [name for name, _ in bench.finishes]
    assert order.index("running") == MAX_OVERTAKES


def test_whoever_waits_for_long_becomes_more_important_than_those_who_came_later():
    bench, ticks = Bench(max_sequences=1), itertools.count()
    bench.engine._now = lambda: float(next(ticks))
    bench.submit("urgent", tokens(8), max_tokens=2)
    bench.step()
    bench.submit("low", tokens(8, 3), max_tokens=2, priority=2)
    for number in range(40):
        bench.submit(f"urgent {number}", tokens(8), max_tokens=2)
    bench.run()
    assert 1 < list(bench.finishes).index(("low", 0)) < 20
