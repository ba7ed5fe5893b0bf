"""Where some layers have windows and others see everything, those with windows keep no more KV than these show."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.batching import limits_of
from policies.batching.room import MAX_PARKED
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from tests.worker.test_engine_models import BLOCK_SIZE, FAMILIES, MAX_TOKENS, STEMS, run, schedules
from tests.worker.test_whole import FAMILIES as ARCHITECTURES
from tests.worker.test_whole import distance, runner_of, steps_of
from tests.worker.tiny import checkpoint
from worker.attention import TwoPools
from worker.engine import Engine
from worker.kv_cache import KVCache
from worker.room import kv_of, kv_shape_of
from worker.runner import Runner
from worker.sampler import Sampler
from worker.windows import num_blocks_for

WINDOW = 9
MIXED = ("gemma2", "gemma3", "gpt-oss")
GEMMA3_LAYERS = 6
"""Of which one sees everything."""


class Models:
    """Each model once: as transformers has it, and on our runner with a pool for each kind of layer."""

    def __init__(self, directory):
        self.directory = directory
        self.load = cache(self._load)
        self.runner = cache(self._runner)
        self.generated = cache(self._generated)

    def _load(self, family):
        architecture, changes = FAMILIES[family]
        layers = {"num_hidden_layers": GEMMA3_LAYERS} if family == "gemma3" else {}
        return checkpoint(self.directory / family, architecture, **changes, **layers)

    def _runner(self, family, may_part=True, **changes):
        self.load(family)
        engine = EngineSettings(
            device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_sequences=8, max_step_tokens=200
        )
        few = {"gemma2": 1 << 20, "gemma3": 3 << 19, "gpt-oss": 1 << 20}[family]
        runner = Runner.load(
            str(self.directory / family), replaced(engine, max_kv_bytes=few, **changes), may_part=may_part
        )
        assert runner.num_blocks >= 64
        return runner

    def _generated(self, family, prompt, num_tokens=MAX_TOKENS):
        whole = self.load(family).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
        )
        return whole[0, len(prompt) :].tolist()

    def engine(self, family, num_blocks=64, attention="auto", **changes):
        """``num_blocks``: of the full pool; the windowed one has no more than it needs."""
        runner = self.runner(family, attention=attention)
        runner.num_blocks = num_blocks  # fewer than there are: the rest stays untouched
        engine = EngineSettings(**{"max_sequences": 8, "max_step_tokens": 200, **changes})
        num_sequences = MAX_PARKED * limits_of(engine).max_sequences
        needed = num_blocks_for(num_sequences, WINDOW, engine.max_step_tokens, BLOCK_SIZE)
        assert needed <= runner.cache.num_windowed_blocks
        runner.apart = replace(runner.apart, num_blocks=needed)
        ticks = itertools.count()
        sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
        return Engine(runner, sampler, engine, lambda: float(next(ticks)))


def replaced(engine: EngineSettings, **changes: Any) -> EngineSettings:
    return EngineSettings(**{name: getattr(engine, name) for name in engine.__struct_fields__} | changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


def asking(name, prompt, num_tokens=MAX_TOKENS, **fields):
    return wire.Submit(name, prompt, Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True), **fields)


@pytest.mark.parametrize("family", MIXED)
@settings(max_examples=15, deadline=None)
@given(schedule=schedules(), attention=st.sampled_from(["auto", "reference"]))
def test_greedy_answers_are_those_of_generate_on_any_schedule(models, family, schedule, attention):
    arrivals, changes = schedule
    answers, _ = run(models.engine(family, attention=attention, **changes), arrivals)
    for _, submit in arrivals:
        expected = models.generated(family, tuple(submit.prompt_token_ids))[: submit.sampling.max_tokens]
        for index in range(submit.num_sequences):
            assert answers[submit.request_id, index] == expected


@pytest.mark.parametrize("family", MIXED)
def test_preempted_cached_and_guessed_answers_are_those_of_generate(models, family):
    prompts = {"first": STEMS[0][:30], "second": STEMS[1][:29], "urgent": STEMS[2][:33], "again": STEMS[1][:29]}
    arrivals = [
        (0, asking("first", prompts["first"], priority=1)),
        (0, asking("second", prompts["second"], priority=1)),
        (6, asking("urgent", prompts["urgent"], priority=0)),
        (40, asking("again", prompts["again"], priority=1)),
    ]
    engine = models.engine(family, num_blocks=11, max_step_tokens=20, speculation=Speculation(enabled=False))
    answers, finishes = run(engine, arrivals)
    for name, prompt in prompts.items():
        assert answers[name, 0] == models.generated(family, tuple(prompt))
    assert finishes["second", 0].num_preemptions >= 1
    assert finishes["again", 0].num_cached_tokens >= BLOCK_SIZE
    engine = models.engine(family, max_step_tokens=20)
    for name in ("told", "foretold"):  # the second time its answer is known by heart
        answers, finishes = run(engine, [(0, asking(name, STEMS[0][:30], num_tokens=40))])
        assert answers[name, 0] == models.generated(family, tuple(STEMS[0][:30]), 40)
    assert finishes["foretold", 0].num_accepted_tokens > 0


@settings(max_examples=15, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, (1 << 64) - 1))
def test_a_seeded_answer_is_that_of_one_pool(models, schedule, seed):
    arrivals, changes = schedule
    sampling = Sampling(max_tokens=MAX_TOKENS, seed=seed, temperature=1.3, top_p=0.95, ignore_eos=True)
    seeded = wire.Submit("seeded", STEMS[0][:40], sampling, num_sequences=2, priority=1)
    crowded, _ = run(models.engine("gemma3", **changes), [*arrivals, (3, seeded)])
    together = models.runner("gemma3", may_part=False)
    assert together.apart is None
    engine = Engine(together, Sampler(together.vocab_size, ()), EngineSettings(), itertools.count().__next__)
    alone, _ = run(engine, [(0, seeded)])
    assert crowded["seeded", 0] == alone["seeded", 0]
    assert crowded["seeded", 1] == alone["seeded", 1]


def test_a_long_answer_uses_only_the_windowed_blocks_that_its_window_and_step_reach(models):
    engine = models.engine("gemma3", max_step_tokens=32, speculation=Speculation(enabled=False))
    assert engine.add(asking("long", STEMS[0][:40], num_tokens=80)) is None
    used = []
    while engine.has_work:
        engine.step()
        engine.audit()
        used += [len(sequence.companions) for sequence in engine._scheduler.running]
    assert max(used) * BLOCK_SIZE <= WINDOW + 32 + 2 * BLOCK_SIZE
    assert max(used[5:]) * BLOCK_SIZE <= WINDOW + 1 + 2 * BLOCK_SIZE
    assert engine.stats().num_used_blocks == 0


def test_a_prefix_is_reused_as_far_as_the_window_before_its_end_is_kept(models):
    """Others that come between take what nobody uses, the oldest first."""
    engine = models.engine("gemma3", max_sequences=1, max_step_tokens=16, speculation=Speculation(enabled=False))
    prompt = STEMS[0][:49]

    def num_cached(name):
        before = engine.stats().num_cached_tokens
        answers, _ = run(engine, [(0, asking(name, prompt, num_tokens=4))])
        assert answers[name, 0] == models.generated("gemma3", tuple(prompt))[:4]
        return engine.stats().num_cached_tokens - before

    assert num_cached("new") == 0
    assert num_cached("again") == 48
    for number in range(3):
        run(engine, [(0, asking(str(number), [number, *STEMS[1][:40]], num_tokens=2))])
    assert engine.stats().num_free_blocks > 20, "no block of the full pool had to go"
    assert num_cached("late") == 0
    assert num_cached("later") == 48


def test_the_same_memory_holds_markedly_more_tokens(models):
    """Of a model shaped like Gemma 3: five layers with windows to each that sees everything."""
    model = models.runner("gemma3")._model
    engine = EngineSettings(block_size=BLOCK_SIZE, max_sequences=8, max_step_tokens=200, max_kv_bytes=3 << 19)
    apart, together = kv_of(model, engine, may_part=True), kv_of(model, engine)
    assert isinstance(apart, TwoPools)
    assert isinstance(together, KVCache)
    assert apart.num_blocks >= 2 * together.num_blocks
    num_bytes = sum(tensor.nbytes for tensor in (*apart.keys, *apart.values))
    assert num_bytes <= engine.max_kv_bytes
    a_block = kv_shape_of(model.architecture).block_bytes(BLOCK_SIZE, model.dtype)
    assert together.num_blocks == engine.max_kv_bytes // a_block


@pytest.mark.parametrize(
    "changes",
    [
        {"max_sequences": 256},  # all those windows would take more than they leave
        {"max_kv_bytes": 1 << 30},  # one pool holds all that could ever run
        {"block_size": 16},  # a window is less than a block
    ],
)
def test_one_pool_stays_where_two_would_not_hold_more(models, changes):
    engine = EngineSettings(block_size=BLOCK_SIZE, max_sequences=8, max_step_tokens=200, max_kv_bytes=3 << 19)
    assert isinstance(kv_of(models.runner("gemma3")._model, replaced(engine, **changes), may_part=True), KVCache)


@pytest.mark.parametrize(("form", "kv_dtype"), [("none", "auto"), ("none", "int8"), ("int8", "auto"), ("int8", "int8")])
def test_a_step_at_once_reads_both_pools_as_operation_by_operation(form, kv_dtype):
    one = runner_of(ARCHITECTURES["windows and two ropes"], form, kv_dtype=kv_dtype)
    if one.whole is None:
        pytest.skip("no tiles here")
    little = EngineSettings(
        device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, max_sequences=2, max_step_tokens=600, max_kv_bytes=9 << 18
    )
    two = Runner.of(one._model, little, may_part=True)
    assert isinstance(two.cache, TwoPools)
    steps = steps_of([None] * 3)
    spans = [span for step in steps for span in step]
    used = {block for span in spans for block in span.block_ids[: -(-(span.start + len(span.token_ids)) // 32)]}
    companions = torch.arange(two.cache.num_windowed_blocks)[: len(used)].flip(0)
    assert len(companions) == len(used)
    two.cache.companions[torch.tensor(sorted(used))] = companions
    at_once = [two.forward(step) for step in steps]
    assert distance(torch.cat([one.forward(step) for step in steps]), torch.cat(at_once)) < 0.02
    two.whole = None
    for step, logits in zip(steps, at_once, strict=True):
        assert torch.equal(two.forward(step), logits)
