"""The engine's promises one by one, on the device that knows what it should read."""

import itertools

import pytest

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from worker.budget import NUM_STEPS_TO_RECOVER, OutOfMemory
from worker.engine import Engine
from worker.sequence import UNKNOWN


class Bench:
    """An engine, and the deltas of all steps so far."""

    def __init__(self, runner=None, **settings):
        self.runner = runner or ScriptedRunner(num_blocks=64)
        self.sampler = ScriptedSampler()
        self.settings = EngineSettings(**{"block_size": 32, "max_step_tokens": 64, **settings})
        ticks = itertools.count()
        self.engine = Engine(self.runner, self.sampler, self.settings, now=lambda: 0.01 * next(ticks))
        self.answers = {}
        self.finishes = {}
        self.failures = {}

    def submit(
        self,
        request_id,
        prompt,
        max_tokens=5,
        seed=0,
        *,
        num_sequences=1,
        priority=0,
        salt=b"",
        promise=(),
        **sampling,
    ):
        """``promise``: further fields of ``Submit``."""
        sampling = Sampling(max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **sampling})
        submit = wire.Submit(request_id, list(prompt), sampling, num_sequences, priority, salt, **dict(promise))
        return self.engine.add(submit)

    def step(self):
        """One step; who moved in it."""
        deltas, failed = self.engine.step()
        self.engine.audit()
        self.take(deltas)
        self.failures |= {failure.request_id: failure for failure in failed}
        return {delta.request_id for delta in deltas}

    def take(self, deltas):
        for delta in deltas:
            self.answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish is not None:
                self.finishes[delta.request_id, delta.index] = delta.finish

    def run(self):
        for _ in range(10_000):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError("the engine does not come to an end")

    def cancel(self, request_id, index=None):
        deltas = self.engine.cancel(request_id, index)
        self.engine.audit()
        self.take(deltas)
        return deltas


def tokens(number, first=1):
    return [1 + (first + position) % 49 for position in range(number)]


def expected(prompt, max_tokens=5, seed=0):
    return answer(prompt, seed, max_tokens, eos_token_ids=())


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
    bench = Bench()
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
        ("invalid_request", {"prompt": [1], "promise": {"emitted_token_ids": {1: [2]}}}),
        ("invalid_request", {"prompt": [1], "promise": {"emitted_token_ids": {0: [50]}}}),
        ("invalid_request", {"prompt": [1], "max_tokens": 2, "promise": {"emitted_token_ids": {0: [2, 3]}}}),
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

    def out_of_memory(spans):
        raise MemoryError("the device has none left")

    bench.runner.fault = out_of_memory
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


def test_the_account_of_an_answer_adds_up():
    bench = Bench(max_sequences=1)
    for name in "ab":
        bench.submit(name, tokens(10))
    bench.run()
    finish = bench.finishes["b", 0]
    assert finish.queue_s > bench.finishes["a", 0].queue_s
    assert finish.prefill_s > 0
    assert finish.decode_s > 0
    stats = bench.engine.stats()
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (10, 12, 8)
    assert (stats.num_cached_tokens, stats.num_blocks) == (8, 64)
    assert stats.step_ms > 0
    assert bench.engine.stats().step_ms == 0
    assert bench.engine.stats().busy_s == stats.busy_s == pytest.approx(1e-3 * 10 * stats.step_ms)


def test_the_time_of_the_steps_is_on_the_accounts_of_those_who_were_in_them():
    bench = Bench()
    bench.submit("alone", tokens(10))
    bench.run()
    alone_s = bench.engine.stats().busy_s
    assert bench.finishes["alone", 0].engine_s == pytest.approx(alone_s)
    bench.submit("long", tokens(40, 20), max_tokens=20, num_sequences=2)
    bench.submit("short", tokens(10, 9), max_tokens=3)
    for _ in range(6):
        bench.step()
    bench.cancel("long", 1)
    bench.cancel("long")
    assert not bench.engine.has_work
    together = [bench.finishes[key].engine_s for key in (("long", 0), ("long", 1), ("short", 0))]
    assert sum(together) == pytest.approx(bench.engine.stats().busy_s - alone_s)
    assert together[0] > together[1] > together[2] > 0


def test_a_request_that_fails_has_its_time_on_its_account():
    bench = Bench()

    def out_of_memory(spans):
        raise MemoryError("the device has none left")

    bench.submit("a", tokens(10), num_sequences=2)
    bench.submit("b", tokens(10, 9))
    for _ in range(2):
        bench.step()
    bench.runner.fault = out_of_memory
    bench.step()
    assert not bench.engine.has_work
    assert sum(failed.engine_s for failed in bench.failures.values()) == pytest.approx(bench.engine.stats().busy_s)
    assert all(failed.engine_s > 0 and failed.kv_block_s > 0 for failed in bench.failures.values())


def test_a_sequence_that_ends_in_the_step_in_which_its_request_fails_is_accounted_for_once():
    bench = Bench()
    start = bench.sampler.start

    def with_nothing_for_the_second(logits, rows, maxima):
        pending = start(logits, rows, maxima)
        if len(rows[0].output_token_ids) == 4:
            pending.token_ids = [-1 if row.seed == 1 else one for row, one in zip(rows, pending.token_ids, strict=True)]
        return pending

    bench.sampler.start = with_nothing_for_the_second
    bench.submit("a", tokens(10), max_tokens=5, num_sequences=2)
    bench.run()
    assert not bench.finishes
    assert bench.failures["a"].engine_s == pytest.approx(bench.engine.stats().busy_s)


def test_blocks_are_on_the_account_for_as_long_as_they_are_held():
    bench = Bench()
    bench.submit("a", tokens(8), max_tokens=4)
    bench.run()
    finish = bench.finishes["a", 0]
    # Two blocks for the prompt, a third one from the second step on.
    assert 2 * finish.prefill_s < finish.kv_block_s < 3 * (finish.prefill_s + finish.decode_s)
    assert finish.kv_block_s > 2 * (finish.prefill_s + finish.decode_s)
    bench.submit("waits", tokens(8))
    assert bench.cancel("waits")[0].finish.kv_block_s == 0


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


def test_penalties_wait_for_the_tokens_they_count():
    bench = Bench(ScriptedRunner(num_blocks=64, overlaps=True))
    bench.submit("a", tokens(10), max_tokens=20, presence_penalty=0.5)
    start = bench.sampler.start

    def all_known(logits, rows, maxima):
        assert all(UNKNOWN not in row.output_token_ids for row in rows)
        return start(logits, rows, maxima)

    bench.sampler.start = all_known
    bench.run()
    assert bench.answers["a", 0] == expected(tokens(10), 20)
