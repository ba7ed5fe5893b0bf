"""The engine whole on a CUDA device that is pretended, put together as it would be there: its kernels, its graphs, and
steps that are given to it before the one before is read. Answers are those of the CPU.
"""

from __future__ import annotations

import itertools

import pytest

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from tests.kernels.device import DEVICE
from tests.kernels.recordings import Repeat
from tests.worker.pretended import pretended
from tests.worker.test_engine_models import BLOCK_SIZE, FAMILIES, STEMS, run
from tests.worker.tiny import checkpoint
from worker.attention.paged import TritonAttention
from worker.engine import Engine
from worker.runner import Runner
from worker.sampler import Sampler

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a device")

CASES = {
    "drawn": ("llama", {}, {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 30}),
    "adjusted": (
        "qwen3",
        {"kv_dtype": "int8"},
        {"num_logprobs": 3, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}, "min_tokens": 3, "stop_token_ids": [7]},
    ),
    "deterministic": ("llama", {"deterministic": True}, {}),
    "experts": ("mixtral", {}, {}),
}


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch):
    monkeypatch.setattr("worker.graphs.CudaRecord", Repeat)
    monkeypatch.setattr("worker.graphs.NUM_STEPS_BEFORE", 1)
    monkeypatch.setattr("worker.graphs.NUM_MIXED_BEFORE", 1)
    monkeypatch.setattr("worker.models.fused.FusedDecoder.agrees", lambda self: False)


def answers_of(directory, engine, asked):
    runner, ticks = Runner.load(str(directory), engine, may_part=True), itertools.count()
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids, by_row=engine.deterministic)
    arrivals = [
        (step, wire.Submit(f"at {step}", STEMS[stem][:num], Sampling(8, ignore_eos=True, **asked), num_sequences))
        for step, stem, num, num_sequences in ((0, 0, 20, 1), (1, 1, 7, 2), (3, 0, 33, 1), (9, 2, 1, 1), (12, 1, 30, 1))
    ]
    return runner, run(Engine(runner, sampler, engine, lambda: float(next(ticks))), arrivals)[0]


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_cpu(tmp_path, case):
    family, changes, asked = CASES[case]
    architecture, config = FAMILIES[family]
    checkpoint(tmp_path, architecture, **config)
    sizes = {"num_threads": 1, "block_size": BLOCK_SIZE, "max_kv_bytes": 1 << 20, "max_sequences": 4}
    engine = {**sizes, **changes, "dtype": "float32", "max_step_tokens": 24, "speculation": Speculation(enabled=False)}
    asked = {"temperature": 0.0, **asked}
    _, expected = answers_of(tmp_path, EngineSettings(device="cpu", **engine), asked)
    with pretended():
        runner, answers = answers_of(tmp_path, EngineSettings(device="cuda", **engine), asked)
    assert answers == expected
    assert runner.overlaps
    assert runner.graphs is not None
    assert {each.has_chunks for each in runner.graphs.recorded} == {True, False}
    assert isinstance(runner.attention, TritonAttention)
