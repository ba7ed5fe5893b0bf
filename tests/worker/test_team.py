"""Threads that the system puts aside in the midst of their tasks: others do them over, and every task counts once."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.test_whole import FAMILIES, PLAIN, runner_of, steps_of
from worker.native.build import SOURCE

NUM_THREADS = 6
"""More than there are cores for, so that all but some are put aside all the time."""
NUM_TIMES = 20
COMPILER = os.environ.get("CXX") or "g++"
WIDE = replace(PLAIN, hidden_size=512, intermediate_size=1056, num_heads=16)


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def others_cpus() -> list[str]:
    """Where this process' other threads may run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                found += re.findall(r"Cpus_allowed_list:\t(.*)", (task / "status").read_text())
    return found


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
def test_where_somebody_else_lets_the_caller_run_from_within_a_step_on_is_where_it_stays(two_cpus):
    runner = runner_of(PLAIN, "int8")
    if runner.whole is None:
        pytest.skip("no step in one call here")
    torch.set_num_threads(2)
    step, caller, is_over = steps_of([None] * 3)[0], threading.get_native_id(), False

    def move() -> None:
        while not is_over:
            if os.sched_getaffinity(caller) == {two_cpus[0]}:
                os.sched_setaffinity(caller, {two_cpus[1]})
                return

    operator = threading.Thread(target=move)
    operator.start()
    while operator.is_alive() and os.sched_getaffinity(0) != {two_cpus[1]}:
        runner.forward(step)
    is_over = True
    operator.join()
    assert os.sched_getaffinity(0) == {two_cpus[1]}


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, int, int]]:
    """Of takeover.cpp, which says more: tasks, how often they were begun, how many were not written once."""
    if shutil.which(COMPILER) is None:
        pytest.skip("no C++ compiler here")
    made = tmp_path_factory.mktemp("takeover") / "takeover"
    source, includes = Path(__file__).with_name("takeover.cpp"), f"-I{SOURCE.parent}"
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-fopenmp", includes, "-o", made, source], check=True)

    def run(*arguments: object) -> tuple[int, int, int]:
        done = subprocess.run([made, *map(str, arguments)], capture_output=True, text=True, check=True)
        tasks, begun, wrong = map(int, done.stdout.split())
        return tasks, begun, wrong

    return run


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_threads", [2, 3, NUM_THREADS])
def test_every_task_of_any_call_is_written_once_before_the_call_ends(takeover, num_threads, seed):
    tasks, begun, wrong = takeover("exact", num_threads, 300, 40, seed)
    assert wrong == 0
    assert begun >= tasks


@pytest.mark.parametrize("clocks", ["ticks", "refused"])
def test_where_nobody_knows_who_runs_no_task_is_taken_from_another(takeover, clocks):
    tasks, begun, wrong = takeover(clocks, 2, 1000, 3, 0)
    assert (begun, wrong) == (tasks, 0)


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
