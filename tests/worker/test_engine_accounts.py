"""What answers took, and whose the time of the steps was."""

import pytest

from tests.worker.engine_bench import Bench, tokens
from tests.worker.scripted import ScriptedRunner


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
    assert stats.num_generated_tokens == 8 + 2
    assert (stats.num_cached_tokens, stats.num_blocks) == (8, 64)
    assert stats.step_ms > 0
    assert bench.engine.stats().step_ms == 0
    assert bench.engine.stats().busy_s == stats.busy_s == pytest.approx(1e-3 * 10 * stats.step_ms)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_is_counted_once_however_often_it_is_computed(prefix_cache):
    bench = Bench(ScriptedRunner(num_blocks=12), prefix_cache=prefix_cache, max_step_tokens=7)
    for position, name in enumerate("abcdef"):
        bench.submit(name, tokens(12 + position % 2, 1 + 20 * (position % 3)), max_tokens=20, num_sequences=2)
    bench.submit("resumed", tokens(9, 70), max_tokens=20, promise={"emitted_token_ids": {0: tokens(5)}})
    bench.run()
    stats = bench.engine.stats()
    found = [bench.finishes[name, 0].num_cached_tokens for name in [*"abcdef", "resumed"]]
    assert stats.num_prompt_tokens == 3 * 12 + 3 * 13 + 9 + 5
    assert stats.num_prefill_tokens > stats.num_prompt_tokens - stats.num_cached_tokens  # as some had to begin again
    assert stats.num_cached_tokens == sum(found)


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

    def broken(spans):
        raise RuntimeError("the device has no such operation")

    bench.submit("a", tokens(10), num_sequences=2)
    bench.submit("b", tokens(10, 9))
    for _ in range(2):
        bench.step()
    bench.runner.fault = broken
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
