"""Triton's kernels on a device: the same properties as under the interpreter."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("file", ["attention", "draws", "graphs", "matrices", "small", "turned"])
def test_kernels_agree_with_torch(file):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/kernels/{file}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
