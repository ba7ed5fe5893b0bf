"""The engine's promises one by one, on the device that knows what it should read."""

import tracemalloc

import pytest

from policies.settings import Speculation
from tests.worker.engine_bench import Bench, expected, tokens
from tests.worker.scripted import ScriptedRunner
from worker import forked
from worker.sequence import UNKNOWN


def test_an_answer_ends_at_its_limit():
    bench = Bench()
    bench.submit("a", tokens(10))
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(10))
    assert bench.finishes["a", 0].reason == "length"


def test_an_answer_goes_on_behind_the_tokens_that_were_emitted_elsewhere():
    whole = expected(tokens(10), 12)
    bench = Bench()
    bench.submit("a", tokens(10), 12, promise={"emitted_token_ids": {0: whole[:5]}})
    bench.run()
    assert bench.answers["a", 0] == whole[5:]
    assert bench.runner.steps[0] == [(0, 15)], "the emitted tokens are computed with the prompt"
    assert bench.finishes["a", 0].reason == "length"


def test_of_several_answers_those_that_have_ended_elsewhere_are_not_begun_again():
    whole = [expected(tokens(10), 12, seed=index) for index in range(4)]
    bench = Bench()
    emitted = {1: whole[1][:7], 2: [], 3: []}
    bench.submit("a", tokens(10), 12, num_sequences=4, promise={"emitted_token_ids": emitted})
    bench.run()
    assert bench.answers == {("a", index): whole[index][len(before) :] for index, before in emitted.items()}


def test_what_was_emitted_elsewhere_is_found_in_the_cache_like_any_prompt():
    whole = expected(tokens(10), 12)
    bench = Bench(speculation=Speculation(enabled=False))  # which knows how the answer goes on
    bench.submit("a", tokens(10), 12)
    bench.run()
    bench.submit("b", tokens(10), 12, promise={"emitted_token_ids": {0: whole[:8]}})
    bench.run()
    assert bench.runner.steps[-4:] == [[(16, 2)], [(18, 1)], [(19, 1)], [(20, 1)]]
    assert bench.answers["b", 0] == whole[8:]
    assert bench.finishes["b", 0].num_cached_tokens == 10, "of the prompt"


def test_an_end_token_stops_an_answer_and_is_part_of_it():
    full = expected(tokens(10), 40)
    for ending in ({"stop_token_ids": (full[3],)}, {"ignore_eos": False}):
        bench = Bench(ScriptedRunner(eos_token_ids=(full[3],)))
        bench.submit("a", tokens(10), 40, **ending)
        bench.run()
        assert bench.answers["a", 0] == full[: full.index(full[3]) + 1]
        assert bench.finishes["a", 0].reason == "stop"


def test_a_prompt_is_computed_in_chunks_and_the_answer_is_the_same():
    bench = Bench(max_step_tokens=7)
    bench.submit("a", tokens(40))
    bench.run()
    assert [num_tokens for ((_, num_tokens),) in bench.runner.steps[:6]] == [7, 7, 7, 7, 7, 5]
    assert bench.answers["a", 0] == expected(tokens(40))


def test_a_long_prompt_does_not_stall_the_streams():
    bench = Bench(max_step_tokens=64, max_prefill_tokens_beside_decodes=8)
    for name in "abc":
        bench.submit(name, tokens(4, ord(name)), max_tokens=30)
    bench.step()
    bench.submit("long", tokens(100))
    for _ in range(12):
        assert {"a", "b", "c"} <= bench.step()
        assert sum(num_tokens for _, num_tokens in bench.runner.steps[-1]) == 3 + 8
    bench.run()
    assert bench.answers["long", 0] == expected(tokens(100))


def test_a_prompt_seen_before_is_computed_only_from_where_it_differs():
    bench = Bench()
    bench.submit("a", tokens(22))
    bench.run()
    bench.submit("b", tokens(22))
    bench.submit("c", [*tokens(9), 40, 41])
    bench.run()
    assert bench.finishes["b", 0].num_cached_tokens == 20
    assert bench.finishes["c", 0].num_cached_tokens == 8
    assert bench.answers["b", 0] == bench.answers["a", 0]


def test_each_answer_to_a_prompt_seen_before_tells_what_of_it_was_found():
    bench = Bench()
    bench.submit("a", tokens(22))
    bench.run()
    bench.submit("b", tokens(22), num_sequences=3)
    bench.run()
    assert [bench.finishes["b", index].num_cached_tokens for index in range(3)] == [20, 20, 20]


def test_the_last_prompt_token_is_computed_even_when_all_of_it_is_cached():
    bench = Bench()
    for name in "ab":
        bench.submit(name, tokens(20))
        bench.run()
    assert bench.finishes["b", 0].num_cached_tokens == 16
    assert bench.answers["b", 0] == bench.answers["a", 0]


def test_an_answer_is_found_again_when_the_conversation_goes_on():
    bench = Bench()
    bench.submit("a", tokens(10), max_tokens=11)
    bench.run()
    bench.submit("b", [*tokens(10), *bench.answers["a", 0], 5, 6])
    bench.run()
    assert bench.finishes["b", 0].num_cached_tokens == 20


def test_another_salt_shares_nothing():
    bench = Bench()
    bench.submit("a", tokens(22), salt=b"tenant")
    bench.run()
    bench.submit("b", tokens(22), salt=b"stranger")
    bench.submit("c", tokens(22), salt=b"tenant")
    bench.run()
    assert bench.finishes["b", 0].num_cached_tokens == 0
    assert bench.finishes["c", 0].num_cached_tokens == 20


def test_without_the_prefix_cache_nothing_is_kept():
    bench = Bench(prefix_cache=False)
    for name in "ab":
        bench.submit(name, tokens(22))
        bench.run()
    assert bench.finishes["b", 0].num_cached_tokens == 0
    assert bench.engine.stats().num_free_blocks == 64


def test_prompts_that_begin_alike_and_come_together_are_computed_once():
    bench = Bench(ScriptedRunner(num_blocks=128), max_step_tokens=512)
    for position, name in enumerate("abcdefgh"):
        bench.submit(name, [*tokens(40), position + 1])
    bench.run()
    assert bench.engine.stats().num_prefill_tokens == 41 + 7
    assert [bench.finishes[name, 0].num_cached_tokens for name in "abcdefgh"] == [0] + 7 * [40]


def test_several_answers_share_one_prompt_and_copy_only_the_block_they_part_in():
    bench = Bench()
    bench.submit("a", tokens(10), seed=7, num_sequences=4)
    assert bench.step() == {"a"}
    assert bench.engine.stats().num_prefill_tokens == 10
    assert bench.engine.stats().num_used_blocks == 3
    bench.step()
    assert (bench.runner.num_copies, bench.engine.stats().num_used_blocks) == (3, 6)
    bench.run()
    for index in range(4):
        assert bench.answers["a", index] == expected(tokens(10), seed=7 + index)


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_that_have_their_prompt_in_one_list_are_the_same(overlaps, monkeypatch):
    monkeypatch.setattr(forked, "MIN_SHARED", 1)
    bench = Bench(ScriptedRunner(overlaps=overlaps, num_blocks=32), max_sequences=3)
    emitted = {0: [], 1: expected(tokens(10), 12, seed=8)[:6], 2: [], 3: []}
    bench.submit("a", tokens(10), 12, seed=7, num_sequences=4, promise={"emitted_token_ids": emitted})
    bench.submit("b", tokens(10), 12, seed=7, num_sequences=2)
    bench.run()
    for index, before in emitted.items():
        assert before + bench.answers["a", index] == expected(tokens(10), 12, seed=7 + index)
    assert bench.answers["b", 1] == expected(tokens(10), 12, seed=8)


def test_many_answers_to_a_long_prompt_have_one_copy_of_it():
    bench = Bench(ScriptedRunner(num_blocks=5_000), prefix_cache=False)
    prompt = tokens(9_000)
    tracemalloc.start()
    assert bench.submit("one", prompt) is None
    of_one, _ = tracemalloc.get_traced_memory()
    assert bench.submit("many", prompt, num_sequences=100) is None
    of_all, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert of_all < 4 * of_one


def test_the_last_seed_is_followed_by_the_first():
    bench = Bench()
    bench.submit("a", tokens(10), seed=(1 << 64) - 1, num_sequences=2)
    bench.run()
    assert bench.answers["a", 1] == expected(tokens(10), seed=0)


def test_more_answers_than_places_are_computed_one_after_the_other():
    bench = Bench(max_sequences=3)
    bench.submit("a", tokens(10), num_sequences=8)
    bench.run()
    for index in range(8):
        assert bench.answers["a", index] == expected(tokens(10), seed=index)


def test_if_the_one_that_computes_the_prompt_is_cancelled_another_does():
    bench = Bench(max_step_tokens=4)
    bench.submit("a", tokens(10), num_sequences=3)
    bench.step()
    bench.cancel("a", 0)
    bench.run()
    assert bench.finishes["a", 0].reason == "cancelled"
    assert bench.answers["a", 1] == expected(tokens(10), seed=1)
    assert bench.answers["a", 2] == expected(tokens(10), seed=2)


def test_cancelling_frees_blocks_at_once_and_reports_each_sequence():
    bench = Bench()
    bench.submit("a", tokens(10), max_tokens=50, num_sequences=2)
    bench.submit("b", tokens(10, 9), max_tokens=50)
    for _ in range(4):
        bench.step()
    assert [(delta.index, delta.finish.reason) for delta in bench.cancel("a")] == [(0, "cancelled"), (1, "cancelled")]
    assert bench.engine.load() == (0, 1)
    assert bench.cancel("a") == bench.cancel("never") == bench.cancel("b", 7) == []
    assert bench.step() == {"b"}


def test_a_waiting_request_is_cancelled_without_ever_running():
    bench = Bench(max_sequences=1)
    bench.submit("a", tokens(10))
    bench.submit("b", tokens(10))
    bench.step()
    (delta,) = bench.cancel("b")
    assert (delta.token_ids, delta.finish.reason) == ([], "cancelled")


def test_when_blocks_run_out_the_later_request_waits_and_gives_the_same_answer():
    bench = Bench(ScriptedRunner(num_blocks=10))
    bench.submit("a", tokens(12), max_tokens=20)
    bench.submit("b", tokens(12, 20), max_tokens=20)
    bench.run()
    assert bench.finishes["a", 0].num_preemptions == 0
    assert bench.finishes["b", 0].num_preemptions >= 1
    assert bench.answers["a", 0] == expected(tokens(12), 20)
    assert bench.answers["b", 0] == expected(tokens(12, 20), 20)


def test_a_full_batch_makes_room_for_a_more_important_request_and_only_for_that():
    bench = Bench(max_sequences=2)
    bench.submit("a", tokens(12), max_tokens=20, priority=1)
    bench.submit("b", tokens(12, 20), max_tokens=20, priority=1)
    bench.step()
    bench.submit("equal", tokens(12, 30), priority=1)
    assert bench.step() == {"a", "b"}
    bench.submit("urgent", tokens(12, 40), priority=0)
    assert bench.step() == {"a", "urgent"}
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_paused, stats.num_displacements) == (3, 1, 1)
    bench.run()
    assert bench.finishes["b", 0].num_preemptions == 0  # it kept its blocks and lost nothing but time
    assert bench.answers["b", 0] == expected(tokens(12, 20), 20)
    assert list(bench.finishes) == [("urgent", 0), ("a", 0), ("b", 0), ("equal", 0)]


def test_equals_are_served_in_order_of_arrival():
    bench = Bench(max_sequences=1)
    for name in "abc":
        bench.submit(name, tokens(10))
    bench.run()
    assert [name for name, _ in bench.finishes] == ["a", "b", "c"]


def test_a_device_that_computes_by_itself_is_given_the_next_step_before_the_last_one_is_read():
    bench = Bench(ScriptedRunner(num_blocks=64, overlaps=True))
    most = 0
    bench.submit("a", tokens(10), max_tokens=20)
    bench.submit("b", tokens(30, 7), max_tokens=12)
    while bench.engine.has_work:
        num_steps = len(bench.runner.steps)
        bench.step()
        most = max(most, bench.sampler.num_untaken)
        if num_steps and len(bench.answers["a", 0]) < 19:
            assert len(bench.runner.steps) == num_steps + 1
            assert bench.sampler.num_untaken == 1, "the host has read what it was to overtake"
    assert most == 1
    assert bench.answers["a", 0] == expected(tokens(10), 20)
    assert bench.answers["b", 0] == expected(tokens(30, 7), 12)
    # The end by length is known beforehand: nothing is computed in vain.
    assert len(bench.runner.steps) == 20


def test_what_ends_by_its_own_token_was_at_most_one_step_ahead():
    full = expected(tokens(10), 40)
    bench = Bench(ScriptedRunner(num_blocks=64, overlaps=True))
    bench.submit("a", tokens(10), 40, stop_token_ids=(full[5],))
    bench.run()
    assert bench.answers["a", 0] == full[: full.index(full[5]) + 1]
    assert len(bench.runner.steps) == full.index(full[5]) + 2


@pytest.mark.parametrize(
    "asked", [{"presence_penalty": 0.5}, {"bad_words": ((8,), (3, 4))}], ids=lambda asked: [*asked]
)
def test_what_follows_from_the_tokens_before_waits_for_them(asked):
    bench = Bench(ScriptedRunner(num_blocks=64, overlaps=True))
    bench.submit("a", tokens(10), max_tokens=20, **asked)
    start = bench.sampler.start

    def all_known(logits, rows, maxima):
        assert all(UNKNOWN not in row.output_token_ids for row in rows)
        return start(logits, rows, maxima)

    bench.sampler.start = all_known
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(10), 20)
