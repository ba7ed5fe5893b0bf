"""An engine whose layers with windows have a pool of their own, on the attention of devices and with their graphs."""

from __future__ import annotations

import itertools

import torch

from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from tests.kernels.device import DEVICE
from tests.kernels.graphs import Repeat
from tests.worker.test_engine_models import BLOCK_SIZE, FAMILIES, STEMS, run
from tests.worker.test_windowed_pool import asking
from tests.worker.tiny import checkpoint
from worker.attention import FixingWindows, Scores, TwoPools
from worker.attention.paged import TritonAttention
from worker.engine import Engine
from worker.graphs import NUM_STEPS_BEFORE, StepGraphs
from worker.loading import load_model
from worker.models import TorchOps
from worker.room import kv_of
from worker.runner import Runner
from worker.sampler import Sampler

ENGINE = EngineSettings(
    device=DEVICE.type,
    dtype="float32",
    num_threads=1,
    block_size=BLOCK_SIZE,
    max_kv_bytes=1 << 18,
    max_sequences=3,
    max_step_tokens=20,
    speculation=Speculation(enabled=False),
)
NUM_BLOCKS, MAX_MODEL_TOKENS, NUM_TOKENS = 11, 128, 9


def on_kernels(directory) -> Runner:
    """What a device has; elsewhere it is put together, with other small operations."""
    if DEVICE.type != "cpu":
        return Runner.load(str(directory), ENGINE, may_part=True)
    model = load_model(str(directory), ENGINE)
    architecture = model.architecture
    cache = kv_of(model, ENGINE, may_part=True)
    assert isinstance(cache, TwoPools)
    scores = Scores(architecture.attention_scale, architecture.windows, architecture.attention_softcap)
    each = [
        TritonAttention(pool, scores.of(layers), architecture.num_heads, num_processors=1)
        for pool, layers in zip(cache.caches, cache.layers, strict=True)
    ]
    attention, ops, most = FixingWindows(*each, cache), TorchOps(), ENGINE.max_sequences
    graphs = StepGraphs(model, ops, attention, MAX_MODEL_TOKENS // BLOCK_SIZE, most, 0, Repeat())
    runner = Runner(model, cache, attention, ops, MAX_MODEL_TOKENS, graphs)
    runner.overlaps = True
    return runner


def test_overtaken_preempted_and_cached_answers_are_those_of_generate(tmp_path, monkeypatch):
    monkeypatch.setattr("worker.graphs.NUM_MIXED_BEFORE", NUM_STEPS_BEFORE)
    architecture, changes = FAMILIES["gemma2"]
    oracle = checkpoint(tmp_path, architecture, num_hidden_layers=2, **changes)
    runner, ticks = on_kernels(tmp_path), itertools.count()
    assert isinstance(runner.attention, FixingWindows)
    runner.num_blocks = NUM_BLOCKS  # fewer than there are
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids, is_compiled=False)
    engine = Engine(runner, sampler, ENGINE, lambda: float(next(ticks)))
    prompts = {"first": STEMS[0][:30], "second": STEMS[1][:29], "urgent": STEMS[2][:33], "again": STEMS[1][:29]}
    arrivals = [
        (0, asking("first", prompts["first"], NUM_TOKENS, priority=1)),
        (0, asking("second", prompts["second"], NUM_TOKENS, priority=1)),
        (6, asking("urgent", prompts["urgent"], NUM_TOKENS, priority=0)),
        (30, asking("again", prompts["again"], NUM_TOKENS, priority=1)),
    ]
    answers, finishes = run(engine, arrivals)
    for name, prompt in prompts.items():
        expected = oracle.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
        )  # fmt: skip
        assert answers[name, 0] == expected[0, len(prompt) :].tolist()
    assert finishes["second", 0].num_preemptions >= 1
    assert finishes["again", 0].num_cached_tokens >= BLOCK_SIZE
    assert runner.graphs.recorded == [(1, 1, 1), (2, 1, 2), (32, 0, 3)]
