"""Memory that runs out inside of a compiled kernel, in any of its threads: the call says so, and the next is right."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker.compiling import made_at, needs_compiler
from worker.budget import OutOfMemory
from worker.inputs import Span
from worker.native import Library
from worker.proof import CASES
from worker.proof import _runner as runner_of

FAILING = ("-include", str(Path(__file__).with_name("failing_new.h")), "-Wl,-Bsymbolic")
NUM_THREADS = 3


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """Kernels whose memory ends when they are told."""
    return made_at(tmp_path_factory.mktemp("failing"), "-O1", *FAILING)


@needs_compiler
def test_wherever_memory_runs_out_the_call_says_so_and_made_again_computes_what_torch_does(failing):
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.exhausted", str(failing), str(NUM_THREADS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 1000


@needs_compiler
def test_a_step_that_finds_no_memory_is_out_of_memory_and_may_be_tried_again(failing):
    library = Library(str(failing))
    runner = runner_of(CASES["float32"], library)
    spans = [Span([1, 2, 3], 0, [0], 1)]
    expected = runner.forward(spans)
    left = ctypes.c_int64.in_dll(ctypes.CDLL(str(failing)), "penstock_allocations")
    left.value = 0
    try:
        with pytest.raises(OutOfMemory, match=r"penstock_.* found no memory"):
            runner.forward(spans)
    finally:
        left.value = -1
    assert torch.equal(runner.forward(spans), expected)
