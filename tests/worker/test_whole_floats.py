"""In float32, too, a step in one call computes what it does operation by operation, to the bit; here and where a
processor has less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.settings import Engine, Quantization
from tests.worker.compiling import elsewhere_at, kernels, needs_compiler
from tests.worker.test_whole import FAMILIES, PLAIN, adapters_of, leaves_the_same_at_once, steps_of, steps_with
from worker.inputs import Span
from worker.means import means_of, whole_of
from worker.models import Architecture, Shard
from worker.models.linear import Means
from worker.models.load import build_decoder
from worker.models.sources import PlainSource
from worker.native import Library
from worker.room import kv_of
from worker.runner import Runner
from worker.speculation.following import follow

pytestmark = needs_compiler

FORMS = ("none", "wide", "int8", "fp8", "int4")
"""``wide``: floats that bfloat16 does not hold."""


@pytest.fixture(scope="module", params=["here", "x86-64-v3"])
def loaded(request, tmp_path_factory) -> Library:
    if request.param == "here":
        return kernels()
    return elsewhere_at(request.param, tmp_path_factory.mktemp("elsewhere"))


def runner_of(loaded: Library, architecture: Architecture, form: str, **changes: Any) -> Runner:
    generator = torch.Generator().manual_seed(3)

    def take(name: str, size: tuple[int, ...]) -> torch.Tensor:
        weight = torch.randn(size, generator=generator) * (0.1 if len(size) > 1 else 0.5)
        return weight if form == "wide" else weight.bfloat16().float()

    engine = Engine(device="cpu", dtype="float32", **changes)
    means = Means(loaded, is_repeatable=engine.deterministic)
    quantization: Quantization = "none" if form == "wide" else form
    model = build_decoder(
        Shard.of(architecture), PlainSource(take), torch.float32, torch.device("cpu"), 2048, means, quantization
    )
    cache = kv_of(model, engine, 200)
    attention, ops = means_of(engine, model, cache, loaded)
    whole = whole_of(model, cache, loaded)
    assert whole is not None
    return Runner(model, cache, attention, ops, 2048, None, whole, loaded, engine.deterministic)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *((form, {}) for form in FORMS),
        ("none", {"kv_dtype": "int8"}),
        ("wide", {"kv_dtype": "bf16"}),
        ("none", {"deterministic": True}),
        ("int4", {"deterministic": True}),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_at_once_is_the_same_operations_in_the_same_order(loaded, family, form, changes):
    runner = runner_of(loaded, FAMILIES[family], form, **changes)
    steps = steps_of([None] * 3)
    at_once = []
    for step in steps:
        at_once.append(runner.forward(step))
        maxima = runner.maxima_of(at_once[-1])
        assert (maxima is None) == bool(FAMILIES[family].logits_softcap)
        if maxima is not None:
            assert torch.equal(maxima, loaded.maxima(at_once[-1]))
    runner.whole = None
    for step, logits in zip(steps, at_once, strict=True):
        assert torch.equal(runner.forward(step), logits)


@pytest.mark.parametrize("form", FORMS)
def test_so_it_is_wherever_rows_are_cut(loaded, form):
    runner = runner_of(loaded, replace(PLAIN, intermediate_size=1056), form)
    whole, ids = runner.whole, torch.randint(1000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for num_tokens in (1, 2, 5, 6, 7, 8, 12, 13, 25, 65, 193, 300):
        span = Span(ids[:num_tokens], 0, list(range(60)), num_tokens)
        runner.whole = whole
        at_once = runner.forward([span])
        runner.whole = None
        assert torch.equal(runner.forward([span]), at_once), num_tokens


def test_a_step_with_adapters_is_computed_operation_by_operation(loaded):
    runner = runner_of(loaded, PLAIN, "int8")
    plain = [runner.forward(step) for step in steps_of([None] * 3)]
    steps = steps_with(adapters_of(PLAIN, torch.float32), ("every", "few", ""))
    adapted = [runner.forward(step) for step in steps]
    assert not all(map(torch.equal, adapted, plain))
    runner.whole = None
    assert all(map(torch.equal, adapted, [runner.forward(step) for step in steps]))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_leaves_behind_what_trained_drafters_read(loaded, family):
    leaves_the_same_at_once(runner_of(loaded, FAMILIES[family], "none"))


@pytest.mark.parametrize("form", ["none", "int4"])
def test_many_steps_in_one_call_say_what_single_steps_say(loaded, form):
    runner = runner_of(loaded, PLAIN, form)
    spans = [Span([5, 6, 7] * 9, 0, [0, 1], 1), Span([8, 9] * 9, 0, [2, 3], 0), Span([4, 4], 0, [4], 1)]
    at_once = follow(runner, spans, 6)
    runner.whole = None
    assert follow(runner, spans, 6) == at_once


@pytest.mark.parametrize("form", ["none", "int8", "int4"])
def test_more_tokens_take_no_less_memory(loaded, form):
    """Only some of them may be left in the last layer, and fewer are multiplied in another way than many."""
    whole = runner_of(loaded, PLAIN, form).whole
    assert whole is not None
    sizes = [loaded.whole_bytes(torch.float32, whole._network, num_tokens, 0) for num_tokens in range(1, 200)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("form", ["none", "int4"])
def test_a_step_is_the_same_however_many_threads_compute_it(loaded, form):
    runner, before, steps = runner_of(loaded, PLAIN, form), torch.get_num_threads(), steps_of([None] * 3)
    alone = [runner.forward(step) for step in steps]
    try:
        torch.set_num_threads(6)  # some of which are put aside all the time
        for _ in range(5):
            assert all(map(torch.equal, alone, [runner.forward(step) for step in steps]))
    finally:
        torch.set_num_threads(before)
