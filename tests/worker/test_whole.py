"""A step in one call of the compiled kernels computes what it does operation by operation, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.settings import Engine, Quantization
from worker.adapters import Adapter
from worker.adapters.adapter import Factor, Place
from worker.adapters.files import assembled
from worker.adapters.targets import targets_of
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


CPU = torch.device("cpu")


def runner_of(architecture: Architecture, form: Quantization, codes: bool = True, **changes: Any) -> Runner:
    generator = torch.Generator().manual_seed(3)

    def take(name: str, size: tuple[int, ...]) -> torch.Tensor:
        scale = 0.1 if len(size) > 1 else 0.5
        return (torch.randn(size, generator=generator) * scale).bfloat16().to(dtype)

    engine = Engine(device="cpu", **{"dtype": "bfloat16", **changes})
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[engine.dtype]
    model = build_decoder(
        Shard.of(architecture), PlainSource(take), dtype, CPU, 2048, Means(library(), codes=codes), form
    )
    return Runner.of(model, engine, num_blocks=200)


def adapters_of(architecture: Architecture, dtype: torch.dtype) -> tuple[Adapter, Adapter]:
    """One of two matrices, and one of all; the same numbers in any type, about half as large as what they add to."""
    generator = torch.Generator().manual_seed(5)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.1).bfloat16()

    made = []
    for name, rank, modules in ("few", 5, ("self_attn.v_proj", "mlp.down_proj")), ("every", 16, None):
        factors: dict[tuple[int, Place], list[Factor]] = {}
        for layer in range(architecture.num_layers):
            for module, target in targets_of(architecture).items():
                if modules is None or module in modules:
                    factor = Factor(random(rank, target.num_in), random(target.num_out, rank), target.left)
                    factors.setdefault((layer, target.product), []).append(factor)
        made.append(assembled(name, name, factors, architecture, dtype, CPU, library()))
    few, every = made
    return few, every


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
        pytest.skip("no step in one call here")
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


WIDE = replace(PLAIN, hidden_size=288, intermediate_size=544)
"""Its products take longer than what is done between them with the sums of those before."""


@pytest.mark.parametrize("form", ["none", "int8"])
@pytest.mark.parametrize("architecture", [PLAIN, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("num_tokens", [65, 71, 72, 73, 255, 257, 300, 513])
def test_so_it_is_wherever_many_rows_are_cut(num_tokens, architecture, form):
    runner = runner_of(architecture, form)
    if runner.whole is None:
        pytest.skip("no step in one call here")
    ids = torch.randint(1000, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()
    span = Span(ids, 0, list(range(60)), num_tokens)
    at_once = runner.forward([span])
    runner.whole = None
    assert torch.equal(runner.forward([span]), at_once)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_weights_in_twelve_bits_it_is_the_same_as_in_sixteen(family):
    coded, plain = (runner_of(FAMILIES[family], "none", codes=codes) for codes in (True, False))
    if coded.whole is None:
        pytest.skip("no step in one call here")
    for step in steps_of([None] * 3):
        got, expected = coded.forward(step), plain.forward(step)
        if library().has_tiles:  # few rows of what is coded are added up without them
            torch.testing.assert_close(got, expected, atol=0.1, rtol=0.1)
        else:
            assert torch.equal(got, expected)


COMPANIES = ("every", "every", ""), ("", "few", "every"), ("", "", "few")


def steps_with(adapters: Sequence[Adapter], company: Sequence[str]) -> list[list[Span]]:
    named = {adapter.adapter_id: adapter for adapter in adapters}
    return steps_of([named.get(name) for name in company])


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_adapters_it_is_the_same_too(family, form):
    runner = runner_of(FAMILIES[family], form)
    whole = runner.whole
    if whole is None:
        pytest.skip("no step in one call here")
    plain = [runner.forward(step) for step in steps_of([None] * 3)]
    for company in COMPANIES:
        steps = steps_with(adapters_of(FAMILIES[family], torch.bfloat16), company)
        at_once = [runner.forward(step) for step in steps]
        runner.whole = None
        assert all(map(torch.equal, at_once, [runner.forward(step) for step in steps]))
        runner.whole = whole
        assert not all(map(torch.equal, at_once, plain))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """As a part of how far logits lie from each other."""
    return float((one - other).square().mean().sqrt() / other.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_with_adapters_of_bfloat16_it_rounds_as_little_as_without(family):
    """What is added is rounded with the product's sums here, and after them operation by operation: not the same bits.
    How far either may be from float32 is measured on the rows of the base in the same steps: 0.0055 to 0.0065, where
    rows with adapters are at most 0.0070 away at once and 0.0075 operation by operation, and adapters move them by
    0.06 to 0.5.
    """
    architecture = FAMILIES[family]
    runner, exact = runner_of(architecture, "none"), runner_of(architecture, "none", dtype="float32", attention="torch")
    whole = runner.whole
    if whole is None:
        pytest.skip("no step in one call here")
    errors: list[float] = []
    adapted: list[float] = []
    moved: list[float] = []
    for company in COMPANIES:
        steps = steps_with(adapters_of(architecture, torch.bfloat16), company)
        at_once = torch.cat([runner.forward(step) for step in steps])
        runner.whole = None
        apart = torch.cat([runner.forward(step) for step in steps])
        runner.whole = whole
        steps_exact = steps_with(adapters_of(architecture, torch.float32), company)
        expected = torch.cat([exact.forward(step) for step in steps_exact])
        base = torch.cat([exact.forward(step) for step in steps_of([None] * 3)])
        owners = [span.adapter for step in steps for span in step for _ in range(span.num_logits)]
        for owner, row, other, right, plain in zip(owners, at_once, apart, expected, base, strict=True):
            if owner is None:
                assert torch.equal(row, other)
                errors.append(distance(row, right))
            else:
                adapted += distance(row, right), distance(other, right)
                moved.append(distance(plain, right))
    assert max(adapted) < 2 * max(errors)
    assert min(moved) > 4 * max(adapted)


def leaves_the_same_at_once(runner: Runner) -> None:
    """What drafters read is there after a step in one call as it is operation by operation."""
    model = runner.keep_hidden()
    model.taps = (0, 2)

    def left(step: list[Span]) -> list[torch.Tensor]:
        logits = runner.forward(step)
        assert model.hidden is not None
        return [logits, *model.tapped, *([model.hidden] if len(logits) else [])]

    steps = steps_of([None] * 3)
    at_once = [left(step) for step in steps]
    assert [len(each) for each in at_once] == [4, 4, 4, 3]
    runner.whole = None
    for step, tensors in zip(steps, at_once, strict=True):
        assert all(map(torch.equal, left(step), tensors))


@pytest.mark.parametrize("form", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_leaves_behind_what_trained_drafters_read(family, form):
    runner = runner_of(FAMILIES[family], form)
    if runner.whole is None:
        pytest.skip("no step in one call here")
    leaves_the_same_at_once(runner)
