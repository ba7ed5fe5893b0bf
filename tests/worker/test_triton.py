"""Triton's kernels without a device: run by its interpreter, and compiled for the devices they are meant for. Steps
are given to a device that is imagined, and what draws is run as it was compiled.

They are processes of their own, for Triton reads the environment when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from tests.builders import ROOT

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")]


INTERPRETED = (
    ("attention", "windows"),
    ("graphs", "small", "turned", "matrices", "draws"),
    ("experts", "mixtures", "streamed"),
)
"""Files that one process runs."""
COMPILED = (("compiled", "unwaited"), ("executed",))
AT_ONCE = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Each has a core busy for minutes, and so have tests of other files beside them."""

Files = tuple[str, ...]


def run(files: Files, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = [f"tests/kernels/{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths]
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    told["OMP_NUM_THREADS"] = "1"  # threads of torch would only wait for each other
    return subprocess.run(command, cwd=ROOT, env=told | environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Files, Future[subprocess.CompletedProcess[str]]]]:
    """All of them, that first which takes longest; those that nobody has waited for are not begun any more."""
    pool = ThreadPoolExecutor(AT_ONCE)
    environments = {files: {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))} for files in COMPILED}
    environments |= {files: {"TRITON_INTERPRET": "1"} for files in INTERPRETED}
    yield {files: pool.submit(run, files, environment) for files, environment in environments.items()}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("files", INTERPRETED, ids="-".join)
def test_kernels_agree_with_torch_under_the_interpreter(running, files):
    passed(running[files])


@pytest.mark.parametrize("files", COMPILED, ids="-".join)
def test_kernels_compile_for_every_device_they_are_meant_for(running, files):
    passed(running[files])


def passed(one: Future[subprocess.CompletedProcess[str]]) -> None:
    done = one.result()
    assert done.returncode == 0, done.stdout + done.stderr
