"""The tests of kernels as processes of their own, for Triton reads the environment when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tests.builders import ROOT

AT_ONCE = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Each has a core busy for minutes, and so have tests of other files beside them."""

Files = tuple[str, ...]
Running = dict[Files, Future[subprocess.CompletedProcess[str]]]


def run(files: Files, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = [f"tests/kernels/{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths]
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    told["OMP_NUM_THREADS"] = "1"  # threads of torch would only wait for each other
    return subprocess.run(command, cwd=ROOT, env=told | environment, capture_output=True, text=True, check=False)


@contextmanager
def running(environments: dict[Files, dict[str, str]]) -> Iterator[Running]:
    """All of them, that first which takes longest; those that nobody has waited for are not begun any more."""
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {files: pool.submit(run, files, environment) for files, environment in environments.items()}
    pool.shutdown(cancel_futures=True)


def passed(one: Future[subprocess.CompletedProcess[str]]) -> None:
    done = one.result()
    assert done.returncode == 0, done.stdout + done.stderr
