"""Threads that the system puts aside in the midst of their tasks: others do them over, and every task counts once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.worker.test_whole import FAMILIES, PLAIN, runner_of, steps_of

NUM_THREADS = 6
"""More than there are cores for, so that all but some are put aside all the time."""
NUM_TIMES = 20
WIDE = replace(PLAIN, hidden_size=512, intermediate_size=1056, num_heads=16)


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("form", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["wide", "norms afterwards"])
def test_a_step_is_the_same_to_the_bit_however_often_its_threads_are_put_aside(family, form):
    runner = runner_of({**FAMILIES, "wide": WIDE}[family], form)
    if runner.whole is None:
        pytest.skip("no step in one call here")
    steps = steps_of([None] * 3)
    torch.set_num_threads(1)
    alone = [runner.forward(step).clone() for step in steps]
    torch.set_num_threads(NUM_THREADS)
    for _ in range(NUM_TIMES):
        for step, logits in zip(steps, alone, strict=True):
            assert torch.equal(runner.forward(step), logits)
