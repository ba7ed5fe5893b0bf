"""Tokens drawn on the device are those that the CPU draws from the same logits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.terms import Sampling
from tests.kernels.device import DEVICE, examples
from tests.worker import sampling_oracle
from worker.native import library
from worker.sampler import Row, Sampler
from worker.sampling import on_device
from worker.sampling.on_device import draw
from worker.sampling.wishes import Wishes

EASY = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


def drawn(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    keys = [(row.seed, len(row.prompt_token_ids) + len(row.output_token_ids)) for row in rows]
    wishes = Wishes.of([row.sampling for row in rows], keys, DEVICE)
    return draw(logits.to(DEVICE), wishes).tolist()


@settings(max_examples=examples(60), **EASY)
@given(
    vocab_size=st.sampled_from((5, 64, 1000, 5000)),
    spread=st.sampled_from((0.5, 3.0, 12.0)),
    asked=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from((0.0, 1e-40, 0.3, 1.0, 2.0)),
                "top_k": st.sampled_from((0, 0, 1, 7, 64, 900, 100_000)),
                "top_p": st.sampled_from((1.0, 1.0, 0.95, 0.5, 0.01)),
                "min_p": st.sampled_from((0.0, 0.0, 0.05, 0.9, 1.0)),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    with_ties=st.booleans(),
    seed=st.integers(0, 1 << 40),
)
def test_the_same_token_is_drawn_as_on_the_cpu(vocab_size, spread, asked, with_ties, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), vocab_size, generator=generator) * spread
    if with_ties:
        logits = logits.round()
    logits[:, ::7] = -torch.inf
    logits[:, 1] = 0.5
    rows = [Row(Sampling(max_tokens=9, **wish), seed + i, [1, 2], [3] * i) for i, wish in enumerate(asked)]
    # Where there is a device it is held against torch, so that nothing has to be compiled for the processor as well.
    with patch("worker.sampler.library", library if DEVICE.type == "cpu" else lambda: None):
        expected = Sampler(vocab_size, ()).sample(logits.clone(), rows).token_ids
    assert drawn(logits, rows) == expected


def test_rows_that_are_no_distribution_fail_alone():
    logits = torch.zeros(5, 200)
    logits[0, 77], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 150] = logits[4, 150] = 60.0
    rows = [sampling_oracle.row(temperature=temperature) for temperature in (1.0, 0.0, 1.0, 1.0, 0.0)]
    assert drawn(logits, rows) == [-1, -1, -1, 150, 150]


def test_the_kernels_are_tried_before_they_draw():
    assert on_device.agrees(DEVICE, 5000)


@pytest.mark.parametrize("vocab_size", [300, 301])
def test_kernels_that_fail_or_draw_other_tokens_are_not_used(monkeypatch, caplog, vocab_size):
    def fail(logits, wishes):
        raise RuntimeError("no such instruction")

    def other(logits, wishes):
        return draw(logits, wishes) + (torch.arange(len(logits), device=DEVICE) == 5)

    monkeypatch.setattr(on_device, "draw", fail if vocab_size == 300 else other)
    monkeypatch.setattr("worker.sampler.has_triton", lambda device: True)
    rows = [sampling_oracle.row(temperature=temperature, seed=seed) for seed, temperature in enumerate((0.0, 1.0, 0.5))]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(4))
    with patch("worker.sampler.library", lambda: None):
        got = Sampler(vocab_size, ()).sample(logits.to(DEVICE), rows).token_ids
    monkeypatch.undo()
    assert got == drawn(logits, rows)
    (record,) = caplog.records
    assert record.message.endswith("torch draws instead")
