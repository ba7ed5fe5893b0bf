"""Triton's kernels on a device: the same properties as under the interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from tests.builders import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0) or find_spec("triton") is None,
        reason="no device for Triton's kernels here",
    ),
]
FILES = ("attention", "draws", "experts", "graphs", "matrices", "mixtures", "small", "streamed", "turned", "windows")

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[Done]]]:
    """All at once: most of what they do is to compile, on a core each."""

    def run(file: str) -> Done:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/kernels/{file}.py"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(len(FILES)) as pool:
        yield {file: pool.submit(run, file) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_kernels_agree_with_torch(running, file):
    done = running[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
