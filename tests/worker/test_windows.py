"""A model whose layers all have windows keeps no more KV than these see, and still answers as generate does."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.tiny import VOCAB_SIZE, checkpoint
from worker.engine import Engine
from worker.runner import Runner
from worker.sampler import Sampler

WINDOW, BLOCK_SIZE, MAX_TOKENS = 9, 4, 60
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "experts": ("MixtralForCausalLM", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "foreign": ("MinistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 8}),
}


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + place).randrange(3, VOCAB_SIZE) for place in range(length)]


class Windowed:
    def __init__(self, directory, kind: str) -> None:
        architecture, changes = MODELS[kind]
        self.oracle = checkpoint(directory, architecture, **changes)
        engine = EngineSettings(
            device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=4 << 20
        )
        self.runner = Runner.load(str(directory), engine)

    def engine(self, num_blocks: int, **changes: Any) -> Engine:
        self.runner.num_blocks = num_blocks
        ticks = itertools.count()
        settings = EngineSettings(block_size=BLOCK_SIZE, **changes)
        return Engine(self.runner, Sampler(self.runner.vocab_size, ()), settings, lambda: float(next(ticks)))

    def generated(self, prompt: list[int]) -> list[int]:
        whole = self.oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
        )
        return whole[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=MODELS)
def windowed(request, tmp_path_factory):
    return Windowed(tmp_path_factory.mktemp(request.param), request.param)


def submit(name: str, prompt: list[int], num_sequences: int = 1, priority: int = 1) -> wire.Submit:
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return wire.Submit(name, prompt, sampling, num_sequences=num_sequences, priority=priority)


def run(engine: Engine, arrivals: list[tuple[int, wire.Submit]]) -> tuple[dict[tuple[str, int], list[int]], list[int]]:
    """The answers, and the blocks used after each step."""
    answers: dict[tuple[str, int], list[int]] = {}
    used = []
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            assert engine.add(arrivals.pop(0)[1]) is None
        if not arrivals and not engine.has_work:
            return answers, used
        deltas, failed = engine.step()
        assert not failed
        engine.audit()
        used.append(engine.stats().num_used_blocks)
        for delta in deltas:
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    raise AssertionError("no end")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_answer_keeps_only_the_blocks_of_its_window(windowed, prefix_cache):
    prompt = prompt_of(7, seed=1)
    answers, used = run(windowed.engine(64, prefix_cache=prefix_cache), [(0, submit("one", prompt))])
    assert answers["one", 0] == windowed.generated(prompt)
    of_window = -(-WINDOW // BLOCK_SIZE) + 2
    assert max(used[-30:-1]) <= of_window
    assert max(used) <= 2 * of_window


def test_a_pool_for_one_whole_sequence_holds_several_windows(windowed):
    """Four of 17 blocks each in a pool of 24, and nobody is put aside."""
    prompts = {str(seed): prompt_of(7, seed) for seed in range(4)}
    engine = windowed.engine(24, prefix_cache=False)
    answers, _ = run(engine, [(0, submit(name, prompt)) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert answers[name, 0] == windowed.generated(prompt)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("num_blocks", [24, 28, 40])
def test_crowded_forked_displaced_and_cached_answers_are_those_of_generate(windowed, num_blocks):
    first, second, urgent = prompt_of(30, 5), prompt_of(11, 6), prompt_of(21, 7)
    prompts = {"first": first, "second": second, "forks": first[:16] + second, "urgent": urgent, "again": first}
    arrivals = [
        (0, submit("first", first)),
        (1, submit("second", second)),
        (5, submit("forks", prompts["forks"], num_sequences=3)),
        (12, submit("urgent", urgent, priority=0)),
        (90, submit("again", first)),
    ]
    answers, _ = run(windowed.engine(num_blocks, max_step_tokens=20), arrivals)
    assert len(answers) == 7
    for (name, _), tokens in answers.items():
        assert tokens == windowed.generated(prompts[name])


def test_the_prompt_is_found_again_after_its_blocks_were_let_go(windowed):
    prompt = prompt_of(41, seed=9)
    engine = windowed.engine(64)
    run(engine, [(0, submit("first", prompt))])
    before = engine.stats().num_cached_tokens
    answers, _ = run(engine, [(0, submit("again", prompt))])
    assert answers["again", 0] == windowed.generated(prompt)
    assert engine.stats().num_cached_tokens - before == 40
