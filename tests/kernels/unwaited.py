"""Whatever a step consists of, it is given to a CUDA device without waiting for it, and what is recorded may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from policies import settings, wire
from policies.terms import Sampling
from tests.kernels.graphs import ARCHITECTURE
from tests.kernels.imagined import DEVICE, Watch, imagined
from worker.adapters import Adapter
from worker.adapters.adapter import Factor
from worker.engine import Engine
from worker.graphs import NUM_STEPS_BEFORE
from worker.models.architecture import Latent, Mixture
from worker.models.linear import Means
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource
from worker.runner import Runner
from worker.sampler import Sampler

MODEL = replace(
    ARCHITECTURE,
    vocab_size=640,
    hidden_size=128,
    num_heads=8,
    head_dim=64,
    max_positions=4096,
    ropes=(replace(ARCHITECTURE.ropes[0], rotary_dim=64, max_positions=4096),),
    windows=(0, 0),
)
EXPERTS = {"mixture": Mixture(16, 4, True), "intermediate_size": 96, "qk_norm": "head"}
GPT_OSS = EXPERTS | {"mixture": Mixture(16, 4, True, "mlp.router", is_stacked=True), "activation": "clamped_swiglu"}
SHARED = Mixture(16, 4, True, num_groups=4, num_chosen_groups=2, scores="sigmoid", num_dense=1, dense_size=192)
DEEPSEEK = EXPERTS | {"mixture": replace(SHARED, shared_size=64, scale=2.5)}
LATENT = {"latent": Latent(64, 64, 128, 128, 96, False), "num_kv_heads": 1, "head_dim": 128, "qk_norm": "none"}
"""Smaller than DeepSeek's, whose 576 numbers of a token no kernel of ours attends to."""
NUM_TOKENS = 2 + 2 * NUM_STEPS_BEFORE
ANYTHING = {"top_p": 0.9, "top_k": 4, "min_p": 0.1}
ADJUSTED = {"presence_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 3, "num_logprobs": 3}


def submit(
    name: str, num_prompt_tokens: int, num_sequences: int = 1, num_tokens: int = NUM_TOKENS, **asked: Any
) -> wire.Submit:
    sampling = Sampling(num_tokens, temperature=0.7, ignore_eos=True, **asked)
    token_ids = [1 + (7 * place + len(name)) % 600 for place in range(num_prompt_tokens)]
    return wire.Submit(name, token_ids, sampling, num_sequences, cache_salt=name.encode())


MIXED = [submit("a", 20), submit("bb", 40, **ANYTHING), submit("ccc", 700, **ADJUSTED), submit("dddd", 900)]


@pytest.fixture
def watch(monkeypatch):
    with imagined(monkeypatch) as watch:
        yield watch


def served(
    watch: Watch,
    submits: Iterable[wire.Submit] = MIXED,
    changes: dict[str, Any] | None = None,
    quantize: str = "none",
    adapters: tuple[Adapter | None, ...] = (None,),
    num_steps: int = 4 * NUM_TOKENS,
    speculates: bool = False,
    **engine: Any,
) -> Runner:
    asked = settings.Engine(device="cuda", dtype="bfloat16", max_sequences=8, **engine)
    own, dtype = replace(MODEL, **(changes or {})), torch.bfloat16
    source = PlainSource(lambda name, shape: torch.empty(shape, dtype=dtype, device=DEVICE))
    model = build_decoder(Shard.of(own), source, dtype, DEVICE, 4096, Means(), quantize)
    is_mixed = min(own.windows) == 0 < max(own.windows)
    runner = Runner.of(model, asked, 600, 600 if is_mixed else 0, may_part=True)
    ticks = count()
    engine_ = Engine(runner, Sampler(own.vocab_size, ()), asked, lambda: 0.01 * next(ticks))
    engine_.speculates = speculates
    watch.seen.clear()
    for at, each in enumerate(submits):
        assert engine_.add(each, adapters[at % len(adapters)]) is None
    for _ in range(num_steps):
        _, failed = engine_.step()
        assert not failed, failed
    assert not engine_.has_work
    assert watch.num_launches
    return runner


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"submits": [submit("a", 20, 3), submit("bb", 40)]},
        {"changes": {"windows": (0, 40)}},
        {"changes": {"attention_softcap": 30.0, "logits_softcap": 30.0, "qk_norm": "head", "qkv_bias": True}},
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"quantize": "fp8", "kv_dtype": "fp8"},
        {"kv_dtype": "int8"},
        {"changes": EXPERTS},
        {"changes": EXPERTS, "quantize": "int8"},
        {"changes": EXPERTS, "quantize": "int4"},
        {"changes": EXPERTS, "quantize": "fp8"},
        {"changes": GPT_OSS | {"sinks": True, "windows": (40, 0)}},
        {"changes": DEEPSEEK},
        {"changes": DEEPSEEK | LATENT},
    ],
    ids=[
        *("plain", "forks", "windows", "caps and norms", "int8", "int4", "fp8", "KV in int8"),
        *("experts", "experts, int8", "experts, int4", "experts, fp8", "gpt-oss", "shared experts", "latent attention"),
    ],
)
def test_steps_wait_for_nobody_and_are_recorded(watch, how):
    runner = served(watch, **how)
    assert watch.seen == []
    assert runner.graphs is not None
    assert (4, 1, 4) in runner.graphs.recorded


@pytest.mark.parametrize(
    "how",
    [{}, {"changes": {"windows": (0, 40)}}, {"quantize": "fp8", "kv_dtype": "fp8"}, {"changes": EXPERTS}],
    ids=["plain", "windows", "fp8", "experts"],
)
def test_steps_with_prompts_wait_for_nobody_and_are_recorded(watch, how, monkeypatch):
    """Sequences end one by one, and another begins in the place of each."""
    monkeypatch.setattr("worker.graphs.NUM_MIXED_BEFORE", 2)
    submits = [submit("a" * num, 20, num_tokens=1 + 2 * num) for num in range(1, 15)]
    runner = served(watch, submits, num_steps=60, **how)
    assert watch.seen == []
    assert runner.graphs is not None
    assert (32, 0, 8) in runner.graphs.recorded


@pytest.mark.parametrize(
    "how", [{}, {"changes": {"windows": (0, 40)}}, {"changes": EXPERTS}], ids=["plain", "windows", "experts"]
)
def test_steps_with_drafts_wait_for_nobody_and_are_recorded(watch, how, monkeypatch):
    """Of what always comes to the same the next tokens are soon foreseen."""
    monkeypatch.setattr("worker.speculation.LOOK_EVERY", 1)
    submits = [submit("a", 20, num_tokens=90), submit("bb", 40, num_tokens=90)]
    few = settings.Speculation(max_draft_tokens=3)
    runner = served(watch, submits, num_steps=200, speculates=True, speculation=few, **how)
    assert watch.seen == []
    assert runner.graphs is not None
    assert (8, 4, 8) in runner.graphs.recorded


def test_adapters_wait_for_nobody(watch):
    sizes = {"qkv": (128, 768), "output": (512, 128), "gate_up": (128, 192), "down": (96, 128)}
    adapters = []
    for name in ("one", "other"):
        factors: dict[Any, tuple[Factor, ...]] = {}
        for place, (num_in, num_out) in sizes.items():
            down, up = (torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for size in ((8, num_in), (num_out, 8)))
            factors |= {(layer, place): (Factor(down, up, 0),) for layer in (0, 1)}
        adapters.append(Adapter(name, "", 8, factors, 0))
    served(watch, adapters=(*adapters, None))
    assert watch.seen == []


def test_adapters_beside_experts_wait_for_nobody(watch):
    factor = Factor(*(torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for size in ((8, 512), (128, 8))), 0)
    adapter = Adapter("one", "", 8, {(layer, "output"): (factor,) for layer in (0, 1)}, 0)
    served(watch, changes=EXPERTS, adapters=(adapter, None))
    assert watch.seen == []


def test_vectors_wait_for_their_own_step(watch):
    kinds = [wire.Pooling(kind) for kind in ("mean", "last", "first")]
    submits = [msgspec.structs.replace(submit("a" * num, 20 * num), pooling=kinds[num % 3]) for num in range(1, 6)]
    served(watch, submits)
    assert watch.seen == []
