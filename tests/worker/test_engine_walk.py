"""A long seeded walk over everything that can happen to a request, on a device that knows what it should read."""

import itertools
import math
import os
import random

import msgspec
import numpy as np
import pytest

from policies import wire
from policies.batching import MAX_OVERTAKES, limits_of
from policies.batching.room import MAX_PARKED
from policies.costs import StepCosts
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer, scores
from worker import forked
from worker.budget import OutOfMemory
from worker.engine import Engine
from worker.speculation import Draft, Speculation, StoreDrafter, SuffixDrafter
from worker.windows import NONE, Apart, num_blocks_for

NUM_OPERATIONS = 100_000
NUM_WALKS = 8


class Prophet:
    """Knows how the answers of the scripted device go on, and says so more or less."""

    name = "prophet"
    is_free = True

    def __init__(self, rng):
        self.rng = rng

    def propose(self, sequences, num_tokens):
        return [self.draft(sequence, num) for sequence, num in zip(sequences, num_tokens, strict=True)]

    def draft(self, sequence, num_tokens):
        if self.rng.random() < 0.001:
            raise ValueError("the spirits are silent")
        # With end tokens in between, and past them.
        token_ids = answer(sequence.token_ids, sequence.row.seed, self.rng.randint(0, num_tokens), eos_token_ids=())
        if token_ids and self.rng.random() < 0.5:
            token_ids[self.rng.randrange(len(token_ids))] = self.rng.randrange(50)
        return Draft(token_ids, self.rng.randrange(20))

    def learn(self, sequence):
        pass

    def forget(self, sequence):
        pass


class Hesitant:
    """As a guide whose masks are made aside: it holds its answer up for a while, now and then for long."""

    is_aside, is_whole, is_cut = True, False, False

    def __init__(self, walk):
        self.walk = walk
        self.hesitate()

    def hesitate(self):
        self.late_until = self.walk.num_steps + self.walk.rng.choice([0, 0, 0, 1, 3, 40])

    @property
    def is_late(self):
        return self.walk.num_steps < self.late_until

    def advance(self, token_id):
        assert not self.is_late, "a token was drawn of an answer that is held up"
        self.hesitate()

    def num_allowed(self, token_ids):
        return 0

    def is_careful(self, num_left, num_drafted):
        return False


class Walk:
    """One engine, and what each of its requests may still expect."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([2, 4, 8])
        self.settings = EngineSettings(
            block_size=32,
            max_sequences=rng.choice([1, 3, 8, 16]),
            max_step_tokens=rng.choice([4, 17, 64]),
            max_prefill_tokens_beside_decodes=rng.choice([1, 5, 32]),
            max_preemptions=rng.choice([0, 1, 3]),
            prefix_cache=rng.random() < 0.8,
        )
        num_blocks = rng.choice([10, 24, 60])
        window = rng.choice([0, 0, 0, 1, 5, 9, 30])
        self.runner = ScriptedRunner(
            num_blocks=num_blocks,
            block_size=self.block_size,
            overlaps=rng.random() < 0.5,
            apart=self.apart(num_blocks) if not window and rng.random() < 0.5 else None,
            window=window,
        )
        self.runner.fault = self.maybe_break_forward
        self.sampler = ScriptedSampler(window=window)
        self.sampler.fault = self.maybe_break_sampling
        self.ticks = itertools.count()
        tick_s = rng.choice([0.001, 0.05, 1.0])
        # What is said of long histories decides who loses blocks, as long as no step has taught otherwise.
        costs = rng.choice([None, StepCosts.of((0.0, tick_s, 0.0, 0.0, tick_s, 0.0, 0.0))])
        self.engine = Engine(self.runner, self.sampler, self.settings, lambda: tick_s * next(self.ticks), costs)
        self.engine._drawing._masks = lambda *_: None
        self.num_steps = 0
        self.hesitancy = rng.choice([0, 0, 0.2, 1.0])
        self.engine.speculates = rng.random() < 0.7
        if rng.random() < 0.7:
            self.guess_well()
        self.request_ids = map(str, itertools.count())
        self.tenants = rng.choice([[b"x"], [b"", b"x", b"y"]])
        self.fault_rate = rng.choice([0, 0.002, 0.02])
        self.shortage_rate = rng.choice([0, 0.002, 0.02])
        self.num_tokens_held = math.inf
        """By what memory the device has just now, in one step."""
        self.stems = [self.tokens(rng.randrange(1, 40)) for _ in range(4)]
        self.live = {}  # request id -> (submit, answers by index)
        self.unscored = set()
        """Of those, the ones that are to be told of their prompts, and were not yet."""
        self.num_paused = 0
        """Over all steps."""
        self.num_accepted = self.num_cancelled = self.num_finished = self.num_failed = self.num_refused = 0
        self.engine_s = 0.0
        """Of all that has ended, as it was told."""
        self.first = None
        self.patience = 0

    def apart(self, num_blocks):
        """As small a pool for layers with windows as may be."""
        window, engine = self.rng.choice([1, 3, 8, 19]), self.settings
        num_sequences = MAX_PARKED * limits_of(engine).max_sequences
        num_apart = num_blocks_for(num_sequences, window, engine.max_step_tokens, self.block_size)
        return Apart(num_apart, window, np.full(num_blocks, NONE))

    def tokens(self, number):
        return [self.rng.randrange(1, 50) for _ in range(number)]

    def guess_well(self):
        """A drafter that knows what comes, in part, and sometimes breaks."""
        drafters = [SuffixDrafter(max_text=20), StoreDrafter(max_shelf=30, max_stored=80), Prophet(self.rng)]
        speculation = Speculation(drafters, self.rng.choice([1, 3, 40]))
        self.engine._speculation = speculation

    def maybe_break_forward(self, spans):
        if self.rng.random() < self.fault_rate:
            raise RuntimeError("the device has none left")
        if self.rng.random() < self.shortage_rate:
            self.num_tokens_held = self.rng.choice([1, 3, 9, math.inf, math.inf])
        if sum(len(span.token_ids) for span in spans) > self.num_tokens_held:
            raise OutOfMemory("the device has no memory left for a step")

    def maybe_break_sampling(self, row):
        if row.seed % 97 == 13 and len(row.output_token_ids) == row.seed % 3:
            raise ValueError("this row cannot be sampled")

    def submit(self):
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randrange(1, 40)] + self.tokens(rng.choice([0, 0, 1, 5, 20]))
        submit = wire.Submit(
            request_id=next(self.request_ids),
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=rng.choice([1, 2, 8, 30]), seed=rng.randrange(1 << 64)),
            num_sequences=rng.choice([1, 1, 1, 2, 4]),
            priority=rng.choice([0, 0, 0, 1, 5]),
            cache_salt=rng.choice([b"", b"a", b"b"]),
            ttft_s=rng.choice([None, -1.0, 0.05, 1.0, 60.0]),
            tpot_s=rng.choice([None, 0.003, 0.1, 10.0]),
            tenant=rng.choice(self.tenants),
            weight=rng.choice([1.0, 1.0, 0.01, 7.0]),
        )
        if rng.random() < 0.05:
            sampling = msgspec.structs.replace(submit.sampling, num_prompt_logprobs=rng.choice([0, 2]))
            submit = msgspec.structs.replace(submit, sampling=sampling)
        if rng.random() < 0.2:
            submit = self.resumed(submit)
        guides = None
        if rng.random() < self.hesitancy:
            guides = {index: Hesitant(self) for index in submit.indices}
        failed = self.engine.add(submit, guides=guides)
        if failed is None:
            emitted = submit.emitted_token_ids
            answers = {index: list(emitted.get(index, [])) for index in submit.indices}
            self.live[submit.request_id] = (submit, answers)
            if submit.sampling.num_prompt_logprobs is not None and not any(emitted.values()):
                self.unscored.add(submit.request_id)
        else:
            capacity = min(self.runner.max_model_tokens, self.runner.num_blocks * self.block_size)
            too_long = len(prompt) + submit.sampling.max_tokens > capacity
            assert failed.code == ("context_length_exceeded" if too_long else "overloaded")
            self.num_refused += 1

    def resumed(self, submit):
        """The same request after some of it was computed elsewhere."""
        sampling, emitted = submit.sampling, {}
        for index in range(submit.num_sequences):
            whole = answer(submit.prompt_token_ids, (sampling.seed + index) % (1 << 64), sampling.max_tokens)
            if self.rng.random() < 0.8:
                emitted[index] = whole[: self.rng.randrange(len(whole))]
        return msgspec.structs.replace(submit, emitted_token_ids=emitted)

    def cancel(self):
        if not self.live:
            return
        request_id = self.rng.choice(list(self.live))
        submit, answers = self.live[request_id]
        index = self.rng.choice([None, *range(submit.num_sequences)])
        deltas = self.engine.cancel(request_id, index)
        assert [delta.index for delta in deltas] == [one for one in sorted(answers) if index in (None, one)]
        for delta in deltas:
            assert delta.finish.reason == "cancelled"
            self.num_cancelled += 1
            self.close(delta)

    def close(self, delta):
        self.engine_s += delta.finish.engine_s
        answers = self.live[delta.request_id][1]
        del answers[delta.index]
        if not answers:
            del self.live[delta.request_id]

    def step(self):
        self.num_steps += 1
        num_steps = len(self.runner.steps)
        deltas, failed = self.engine.step()
        if len(self.runner.steps) > num_steps:
            spans = self.runner.steps.pop()
            assert sum(num_tokens for _, num_tokens in spans) <= self.settings.max_step_tokens
            assert len(spans) <= self.settings.max_sequences
        stats = self.engine.stats()
        self.num_paused += stats.num_paused
        assert stats.num_running <= MAX_PARKED * self.settings.max_sequences
        for delta in deltas:
            submit, answers = self.live[delta.request_id]
            answers[delta.index] += delta.token_ids
            self.check_scores(submit, delta)
            if delta.finish is not None:
                self.num_finished += 1
                assert 0 <= delta.finish.num_accepted_tokens <= delta.finish.num_drafted_tokens
                self.num_accepted += delta.finish.num_accepted_tokens
                sampling = submit.sampling
                expected = answer(
                    submit.prompt_token_ids, (sampling.seed + delta.index) % (1 << 64), sampling.max_tokens
                )
                assert answers[delta.index] == expected
                assert delta.finish.reason == ("stop" if expected[-1] == 0 else "length")
                num_known = len(submit.prompt_token_ids) + len(submit.emitted_token_ids.get(delta.index, []))
                assert delta.finish.num_cached_tokens <= min(len(submit.prompt_token_ids), num_known - 1)
                self.close(delta)
        for failure in failed:
            assert failure.code == "internal"
            assert "OutOfMemory" not in failure.reason, "a step of one token fits"
            self.num_failed += 1
            self.engine_s += failure.engine_s
            del self.live[failure.request_id]
        self.check_that_the_first_moves({(delta.request_id, delta.index) for delta in deltas})

    def check_scores(self, submit, delta):
        """A prompt is told of with the first token behind it, whole."""
        is_due = submit.request_id in self.unscored and bool(delta.token_ids)
        assert (delta.prompt_logprobs is not None) == is_due
        if is_due:
            self.unscored.discard(submit.request_id)
            num_top, total = submit.sampling.num_prompt_logprobs, math.log(self.runner.vocab_size - 1 + math.e)
            told = delta.prompt_logprobs
            assert [each.logprob for each in told] == pytest.approx(
                [score - total for score in scores(submit.prompt_token_ids)], abs=1e-5
            )
            assert all(len(each.top_token_ids) == len(each.top_logprobs) == num_top for each in told)

    def check_that_the_first_moves(self, moved):
        """Nothing starves, because whatever is first in order is served within its own prompt's time."""
        if not self.live:
            return
        scheduler = self.engine._scheduler
        able = [each for each in scheduler.waiting + scheduler.running if not (each.guide and each.is_held_up)]
        if not able:
            return
        sequence = min(able, key=lambda one: one.place)
        first = (sequence.request.request_id, sequence.index)
        num_known = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if first != self.first or first in moved:
            # Before it, tenants have their turns, and a few may overtake it where it does not fit.
            num_before = MAX_OVERTAKES + (1 if len(self.tenants) == 1 else 40)
            self.first, self.patience = first, (16 + 8 * num_known) * num_before
        else:
            self.patience -= 1
            assert self.patience > 0, f"{first} is first in order and does not move"

    def run(self, num_operations):
        rng = self.rng
        eagerness = rng.choice([0.15, 0.3, 0.5])
        for _ in range(num_operations):
            draw = rng.random()
            if draw < eagerness:
                self.submit()
            elif draw < eagerness + 0.08:
                self.cancel()
            else:
                self.step()
            self.engine.audit()
        while self.engine.has_work:
            if rng.random() < 0.02:
                self.cancel()
            self.step()
            self.engine.audit()
        assert not self.engine.has_work
        stats = self.engine.stats()
        assert (stats.num_used_blocks, stats.num_waiting, stats.num_running) == (0, 0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert self.engine_s == pytest.approx(stats.busy_s, rel=1e-9), "a step is on nobody's account, or on two"
        assert self.num_finished
        return stats


@pytest.mark.parametrize("walk", range(NUM_WALKS))
def test_no_block_is_used_or_lost_and_no_token_is_wrong_after_any_walk(walk, monkeypatch):
    if walk % 2:
        monkeypatch.setattr(forked, "MIN_SHARED", 1)
    base = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    seed = base + walk
    try:
        Walk(seed).run(NUM_OPERATIONS // NUM_WALKS)
    except BaseException:
        print(f"seed {seed}: PENSTOCK_TEST_SEED={seed} and walk 0 repeat it")
        raise
