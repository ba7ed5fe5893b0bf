"""Threads that the system puts aside in the midst of their tasks: others do them over, and every task counts once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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


def others_cpus() -> list[str]:
    """Where this process' other threads may run."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return re.findall(r"Cpus_allowed_list:\t(.*)", "".join((task / "status").read_text() for task in tasks))


@pytest.fixture
def two_cpus() -> Iterator[list[int]]:
    if not hasattr(os, "sched_setaffinity") or len(before := os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs to choose from")
    two = sorted(before)[:2]
    os.sched_setaffinity(0, two)
    yield two
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("num_threads")
def test_as_many_threads_as_cpus_keep_to_one_each_and_the_caller_only_for_a_step(two_cpus):
    runner = runner_of(PLAIN, "int8")
    if runner.whole is None:
        pytest.skip("no step in one call here")
    step = steps_of([None] * 3)[0]
    for num_threads, num_kept in ((2, 1), (3, 0), (2, 1)):
        torch.set_num_threads(num_threads)
        runner.forward(step)
        assert others_cpus().count(str(two_cpus[1])) == num_kept
        assert os.sched_getaffinity(0) == set(two_cpus)


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
