"""Where the processor has no tiles, what is computed with them is held against the same oracles by their emulation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.builders import ROOT
from worker.native import library

HELD = ("test_whole.py", "test_attention.py", "test_adapters.py", "test_quantised_linear.py")


def test_steps_attention_adapters_and_quantised_matrices_are_right_by_tiles_too(tmp_path):
    kernels = library()
    if kernels is None or not kernels.has_linear:
        pytest.skip("no compiled kernels for bfloat16 here")
    if kernels.has_tiles:
        pytest.skip("the processor has tiles, so these tests have been run with them")
    files = [f"tests/worker/{name}" for name in HELD]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.with_tiles", "-q", "-n", "0", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
