"""What the engine refuses, and what happens when a step, a sample or the memory fails."""

import math

import pytest
import torch

from tests.worker.engine_bench import Bench, expected, tokens
from tests.worker.scripted import ScriptedRunner
from worker.budget import NUM_STEPS_TO_RECOVER, OutOfMemory
from worker.transfer import rows_of


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("context_length_exceeded", {"prompt": tokens(250), "max_tokens": 7}),
        ("invalid_request", {"prompt": []}),
        ("invalid_request", {"prompt": [50]}),
        ("invalid_request", {"prompt": [-1]}),
        ("invalid_request", {"prompt": [1], "max_tokens": 0}),
        ("invalid_request", {"prompt": [1], "num_sequences": 0}),
        ("invalid_request", {"prompt": [1], "stop_token_ids": (99,)}),
        ("invalid_request", {"prompt": [1], "logit_bias": {-3: 1.0}}),
        ("invalid_request", {"prompt": [1], "allowed_token_ids": (1, 99)}),
        ("invalid_request", {"prompt": [1], "bad_words": ((1, 2), (3, -1))}),
        ("invalid_request", {"prompt": [1], "promise": {"emitted_token_ids": {1: [2]}}}),
        ("invalid_request", {"prompt": [1], "promise": {"emitted_token_ids": {0: [50]}}}),
        ("invalid_request", {"prompt": [1], "promise": {"predicted_token_ids": [2, 50]}}),
        ("invalid_request", {"prompt": [1], "promise": {"predicted_token_ids": [-1]}}),
        ("invalid_request", {"prompt": [1], "max_tokens": 2, "promise": {"emitted_token_ids": {0: [2, 3]}}}),
        ("invalid_request", {"prompt": [1], "promise": {"ttft_s": math.nan}}),
        ("invalid_request", {"prompt": [1], "promise": {"ttft_s": math.inf}}),
        ("invalid_request", {"prompt": [1], "promise": {"tpot_s": -math.inf}}),
        ("invalid_request", {"prompt": [1], "promise": {"weight": 0.0}}),
        ("invalid_request", {"prompt": [1], "promise": {"weight": math.nan}}),
        ("invalid_request", {"prompt": [1], "num_logprobs": -1}),
        ("invalid_request", {"prompt": [1], "temperature": -1.0}),
        ("invalid_request", {"prompt": [1], "temperature": math.inf}),
        ("invalid_request", {"prompt": [1], "presence_penalty": math.nan}),
        ("invalid_request", {"prompt": [1], "repetition_penalty": 0.0}),
        ("invalid_request", {"prompt": [1], "top_p": math.nan}),
        ("invalid_request", {"prompt": [1], "top_p": 0.9, "min_p": math.inf}),
        ("overloaded", {"prompt": [1], "num_sequences": 129}),
    ],
)
def test_what_can_never_be_answered_is_refused_by_name(code, request_):
    bench = Bench(max_sequences=4)
    assert bench.submit("a", **request_).code == code
    assert not bench.engine.has_work


def test_the_longest_request_that_fits_is_answered():
    bench = Bench()
    assert bench.submit("a", tokens(250), max_tokens=6) is None
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(250), 6)


def test_a_request_id_in_use_is_refused_and_its_owner_undisturbed():
    bench = Bench()
    bench.submit("a", tokens(10))
    assert bench.submit("a", tokens(3)).code == "invalid_request"
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(10))


def test_the_line_is_bounded():
    bench = Bench(max_sequences=40)
    assert all(bench.submit(str(number), tokens(3)) is None for number in range(160))
    assert bench.submit("one too many", tokens(3)).code == "overloaded"


def test_a_step_that_is_done_again_in_parts_was_nobodys_turn():
    bench = Bench(ScriptedRunner(num_blocks=256), max_step_tokens=32, prefix_cache=False)
    for name, first in (("a", 1), ("b", 30)):
        bench.submit(name, tokens(200, first), promise={"tenant": name.encode()})
    computed, shortages = [], [OutOfMemory("no memory")]

    def fault(spans):
        if shortages:
            raise shortages.pop()
        computed.extend(span.token_ids == tokens(16, 1 + span.start) for span in spans)

    bench.runner.fault = fault
    for _ in range(7):
        bench.step()
    assert computed == [True, False] * 3


def test_while_draining_nothing_new_is_taken_and_what_runs_is_finished():
    bench = Bench()
    bench.submit("a", tokens(10))
    bench.engine.draining = True
    assert bench.submit("b", tokens(10)).code == "draining"
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(10))


def test_a_fault_of_a_step_fails_its_requests_and_the_engine_goes_on():
    bench = Bench(max_sequences=2)
    for name in "abc":
        bench.submit(name, tokens(10, ord(name)))
    bench.step()

    def broken(spans):
        raise RuntimeError("the device has no such operation")

    bench.runner.fault = broken
    bench.step()
    bench.runner.fault = None
    assert {failure.request_id: failure.code for failure in bench.failures.values()} == {
        "a": "internal",
        "b": "internal",
    }
    bench.run()
    assert bench.answers["c", 0] == expected(tokens(10, ord("c")))
    assert bench.engine.stats().num_used_blocks == 0


def memory_for(num_tokens):
    def fault(spans):
        if sum(len(span.token_ids) for span in spans) > num_tokens:
            raise OutOfMemory("no memory")

    return fault


def test_where_memory_runs_out_steps_become_smaller_and_nothing_is_lost():
    bench = Bench()
    bench.runner.fault = memory_for(5)
    for name in "abcdefgh":
        bench.submit(name, tokens(20, ord(name)), max_tokens=8)
    bench.run()
    assert not bench.failures
    for name in "abcdefgh":
        assert bench.answers[name, 0] == expected(tokens(20, ord(name)), 8)


def test_where_memory_runs_out_a_more_important_request_does_not_wait_for_all_others_to_end():
    bench = Bench(ScriptedRunner(num_blocks=128))
    for name in "abcdefgh":
        bench.submit(name, tokens(5, ord(name)), max_tokens=50, priority=5)
    bench.step()
    bench.runner.fault = memory_for(4)
    bench.submit("urgent", tokens(10), max_tokens=2)
    bench.run()
    assert not bench.failures
    assert next(iter(bench.finishes)) == ("urgent", 0)


def test_where_memory_runs_out_while_an_answer_catches_up_it_keeps_what_is_still_to_have_a_name():
    bench = Bench(ScriptedRunner(window=2), max_step_tokens=7)
    written = expected(tokens(21), 9)
    bench.submit("a", tokens(21), max_tokens=9, promise={"emitted_token_ids": {0: written[:4]}})
    bench.step()
    bench.runner.fault = memory_for(5)
    bench.step()
    bench.runner.fault = None
    bench.run()
    assert bench.answers["a", 0] == written[4:]


def test_when_there_is_memory_again_steps_grow_again():
    bench = Bench(ScriptedRunner(num_blocks=128))
    bench.runner.fault = memory_for(10)
    bench.submit("a", tokens(60), max_tokens=400)
    for _ in range(20):
        bench.step()
    bench.runner.fault = None
    for _ in range(4 * NUM_STEPS_TO_RECOVER):
        bench.step()
    bench.submit("b", tokens(50, 30), max_tokens=1)
    bench.step()
    assert sum(num_tokens for _, num_tokens in bench.runner.steps[-1]) == 51


def test_what_does_not_fit_alone_fails_and_the_engine_goes_on():
    bench = Bench()
    bench.runner.fault = memory_for(0)
    bench.submit("a", tokens(20))
    bench.run()
    assert bench.failures["a"].reason == "OutOfMemory: no memory"
    bench.runner.fault = None
    bench.submit("b", tokens(20))
    bench.run()
    assert bench.answers["b", 0] == expected(tokens(20))


@pytest.mark.parametrize(("num_shortages", "is_answered"), [(1, True), (2, False)])
def test_an_answer_that_is_drawn_alone_is_drawn_once_more_where_memory_was_short(num_shortages, is_answered):
    bench = Bench()
    start, shortages = bench.sampler.start, [torch.OutOfMemoryError("no memory")] * num_shortages

    def short(logits, rows, maxima):
        if shortages:
            raise shortages.pop()
        return start(logits, rows, maxima)

    bench.sampler.start = short
    bench.submit("a", tokens(20), max_tokens=8)
    bench.run()
    assert not shortages
    if is_answered:
        assert bench.answers["a", 0] == expected(tokens(20), 8)
    else:
        assert bench.failures["a"].reason == "OutOfMemoryError: no memory"
    bench.submit("b", tokens(20, 30), max_tokens=8)
    bench.run()
    assert bench.answers["b", 0] == expected(tokens(20, 30), 8)


def test_a_fault_of_one_request_fails_that_one_alone():
    bench = Bench()

    def poisoned(row):
        if row.seed == 13 and len(row.output_token_ids) == 2:
            raise ValueError("this row cannot be sampled")

    bench.sampler.fault = poisoned
    bench.submit("a", tokens(10), seed=1)
    bench.submit("b", tokens(10, 9), seed=12, num_sequences=2)
    bench.submit("c", tokens(10, 20), seed=3)
    bench.run()
    assert list(bench.failures) == ["b"]
    assert "this row cannot be sampled" in bench.failures["b"].reason
    assert bench.answers["a", 0] == expected(tokens(10), seed=1)
    assert bench.answers["c", 0] == expected(tokens(10, 20), seed=3)


def test_logits_that_are_no_distribution_fail_their_request_alone():
    bench = Bench()
    start = bench.sampler.start

    def with_nothing_for_seed_two(logits, rows, maxima):
        pending = start(logits, rows, maxima)
        pending.token_ids = [-1 if row.seed == 2 else one for row, one in zip(rows, pending.token_ids, strict=True)]
        return pending

    bench.sampler.start = with_nothing_for_seed_two
    for seed in (1, 2, 3):
        bench.submit(str(seed), tokens(10, seed), seed=seed)
    bench.run()
    assert list(bench.failures) == ["2"]
    assert bench.answers["3", 0] == expected(tokens(10, 3), seed=3)


def test_a_broken_invariant_stops_everything():
    bench = Bench()
    bench.submit("a", tokens(10))
    bench.step()
    bench.runner.memory[:] = 0
    with pytest.raises(AssertionError, match="not its own history"):
        bench.step()


def test_where_memory_runs_out_while_tokens_are_drawn_steps_become_smaller_and_nothing_is_lost():
    bench = Bench(ScriptedRunner(num_blocks=128))
    start, nums = bench.sampler.start, []

    def for_three_at_most(logits, rows, maxima):
        nums.append(len(rows))
        if len(rows) > 3:
            raise MemoryError("no memory for so many rows")
        return start(logits, rows, maxima)

    bench.sampler.start = for_three_at_most
    for name in "abcdefgh":
        bench.submit(name, tokens(20, ord(name)), max_tokens=30)
    bench.run()
    assert not bench.failures
    for name in "abcdefgh":
        assert bench.answers[name, 0] == expected(tokens(20, ord(name)), 30)
    # Once in a while it is tried with twice as many.
    assert sum(num > 3 for num in nums) <= 3 + len(nums) // NUM_STEPS_TO_RECOVER


def test_memory_that_is_short_where_rows_of_the_logits_are_copied_ends_neither_the_worker_nor_an_answer(monkeypatch):
    bench = Bench()
    faults = [torch.OutOfMemoryError("no memory")]

    def short(logits, indices):
        if faults:
            raise faults.pop()
        return rows_of(logits, indices)

    monkeypatch.setattr("worker.drawing.rows_of", short)
    for each in "abc":
        bench.submit(each, tokens(20, ord(each)), max_tokens=8)
    bench.run()
    assert not bench.failures
    assert not faults
    for each in "abc":
        assert bench.answers[each, 0] == expected(tokens(20, ord(each)), 8)


def test_memory_that_is_short_again_where_suspects_are_drawn_one_by_one_ends_one_answer_at_most(monkeypatch):
    bench = Bench()
    start, faults, shortages = bench.sampler.start, [MemoryError("no memory")], [torch.OutOfMemoryError("no memory")]

    def short_once(logits, rows, maxima):
        if len(rows) > 1 and faults:
            raise faults.pop()
        return start(logits, rows, maxima)

    def short_of_copies(logits, indices):
        if len(indices) < len(logits) and shortages:
            raise shortages.pop()
        return rows_of(logits, indices)

    bench.sampler.start = short_once
    monkeypatch.setattr("worker.drawing.rows_of", short_of_copies)
    for each in "abcdefgh":
        bench.submit(each, tokens(2, ord(each)), max_tokens=8)
    bench.run()
    assert not shortages
    assert len(bench.failures) <= 1
    for each in set("abcdefgh") - set(bench.failures):
        assert bench.answers[each, 0] == expected(tokens(2, ord(each)), 8)


def test_where_there_is_memory_for_one_token_and_one_row_alone_forks_are_answered_all_the_same():
    bench = Bench()
    start = bench.sampler.start

    def for_one_row(logits, rows, maxima):
        if len(rows) > 1:
            raise MemoryError("no memory")
        return start(logits, rows, maxima)

    def for_one_token(spans):
        if sum(len(span.token_ids) for span in spans) > 1:
            raise OutOfMemory("no memory")

    bench.runner.fault, bench.sampler.start = for_one_token, for_one_row
    bench.submit("a", tokens(9), num_sequences=2)
    bench.run()
    assert not bench.failures
    assert bench.answers["a", 0] == expected(tokens(9))


def test_what_a_step_without_usable_numbers_has_left_is_found_by_nobody():
    bench = Bench()
    prompt, ill = tokens(40), [True]
    start = bench.sampler.start

    def with_nothing_at_first(logits, rows, maxima):
        pending = start(logits, rows, maxima)
        if ill:
            pending.token_ids = [-1] * len(pending.token_ids)
        return pending

    bench.sampler.start = with_nothing_at_first
    bench.submit("a", prompt)
    bench.run()
    assert list(bench.failures) == ["a"]
    assert bench.engine.stats().num_cached_blocks == 0
    ill.clear()
    for name, last, num_cached in (("b", 7, 0), ("c", 8, 40)):
        bench.submit(name, [*prompt, last])
        bench.run()
        assert bench.finishes[name, 0].num_cached_tokens == num_cached
        assert bench.answers[name, 0] == expected([*prompt, last])
