"""A step in one call of the compiled kernels computes what it does operation by operation, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.adapters import random_adapter
from policies.settings import Engine, Quantization
from worker.adapters import Adapter
from worker.inputs import Span
from worker.models import Architecture, Shard
from worker.models.architecture import Rope
from worker.models.linear import Means
from worker.models.load import build_decoder
from worker.models.sources import PlainSource
from worker.native import library
from worker.runner import Runner

PLAIN = Architecture(
    name="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=96,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_positions=2048,
    norm_eps=1e-6,
    attention_scale=32**-0.5,
    ropes=(Rope(rotary_dim=32, max_positions=2048),),
    layer_ropes=(0,) * 3,
    windows=(0,) * 3,
    qkv_bias=True,
    mlp_bias=True,
)
FAMILIES = {
    "plain": PLAIN,
    "windows and two ropes": replace(
        PLAIN,
        windows=(40, 0, 40),
        ropes=(Rope(rotary_dim=32, max_positions=2048), Rope(rotary_dim=32, max_positions=2048, theta=500.0)),
        layer_ropes=(0, 1, 0),
        attention_post_norm="post_attention_norm",
        mlp_post_norm="post_mlp_norm",
        embedding_scale=9.7,
        logits_softcap=30.0,
        activation="gelu_tanh",
        qk_norm="head",
    ),
    "norms afterwards": replace(
        PLAIN,
        attention_pre_norm="",
        mlp_pre_norm="",
        attention_post_norm="post_attention_norm",
        mlp_post_norm="post_mlp_norm",
        qk_norm="width",
        tied=True,
    ),
}


def runner_of(architecture: Architecture, form: Quantization, **changes: Any) -> Runner:
    generator = torch.Generator().manual_seed(3)

    def take(name: str, size: tuple[int, ...]) -> torch.Tensor:
        scale = 0.1 if len(size) > 1 else 0.5
        return (torch.randn(size, generator=generator) * scale).bfloat16()

    dtype, device = torch.bfloat16, torch.device("cpu")
    model = build_decoder(Shard.of(architecture), PlainSource(take), dtype, device, 2048, Means(library()), form)
    return Runner.of(model, Engine(dtype="bfloat16", device="cpu", **changes), num_blocks=200)


def steps_of(adapters: Sequence[Adapter | None]) -> list[list[Span]]:
    """Three sequences, each with one of them; some steps have many rows, some few, and one asks for no logits."""
    ids = torch.randint(1000, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [list(range(60, 0, -1)), list(range(100, 140)), list(range(140, 180))]
    steps = [
        [Span(ids[:530], 0, tables[0], 1), Span(ids[:70], 0, tables[1], 0)],
        [Span(ids[530:531], 530, tables[0], 1), Span(ids[70:99], 70, tables[1], 1), Span(ids[:9], 0, tables[2], 1)],
        [Span(ids[531:532], 531, tables[0], 1), Span(ids[99:102], 99, tables[1], 3), Span(ids[9:10], 9, tables[2], 1)],
        [Span(ids[10:20], 10, tables[2], 0)],
    ]
    of_table = {id(table): adapter for table, adapter in zip(tables, adapters, strict=True)}
    return [[replace(span, adapter=of_table[id(span.block_ids)]) for span in step] for step in steps]


@pytest.mark.parametrize(("form", "kv_dtype"), [("none", "auto"), ("none", "int8"), ("int8", "auto"), ("int4", "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_at_once_is_the_same_operations_in_the_same_order(family, form, kv_dtype):
    runner = runner_of(FAMILIES[family], form, kv_dtype=kv_dtype)
    if runner.whole is None:
        pytest.skip("no tiles here")
    steps = steps_of([None] * 3)
    at_once = []
    for step in steps:
        at_once.append(runner.forward(step))
        maxima = runner.maxima_of(at_once[-1])
        if maxima is not None:
            assert torch.equal(maxima, library().maxima(at_once[-1]))
        assert (maxima is None) == bool(FAMILIES[family].logits_softcap)
        assert runner.maxima_of(at_once[-1].clone()) is None
    runner.whole = None
    for step, logits in zip(steps, at_once, strict=True):
        assert torch.equal(runner.forward(step), logits)


@pytest.mark.parametrize("form", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_adapters_it_is_the_same_too(family, form):
    architecture = FAMILIES[family]
    runner = runner_of(architecture, form)
    whole = runner.whole
    if whole is None:
        pytest.skip("no tiles here")
    generator = torch.Generator().manual_seed(5)
    few = random_adapter("few", architecture, 5, ("self_attn.v_proj", "mlp.down_proj"), generator)
    every = random_adapter("every", architecture, 16, None, generator)
    plain = [runner.forward(step) for step in steps_of([None] * 3)]
    for adapters in ([every, every, None], [None, few, every], [None, None, few]):
        steps = steps_of(adapters)
        at_once = [runner.forward(step) for step in steps]
        runner.whole = None
        assert all(map(torch.equal, at_once, [runner.forward(step) for step in steps]))
        runner.whole = whole
        assert not all(map(torch.equal, at_once, plain))
