"""Triton's kernels on a device: the same properties as under the interpreter."""

from __future__ import annotations

import os
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
FILES = ("attention", "draws", "experts", "graphs", "matrices", "mixtures", "small", "streamed", "turned", "windows")
MOST_AT_ONCE = 14
"""Each has a context of CUDA of its own."""


def test_kernels_agree_with_torch():
    """Side by side: most of what they do is to compile."""
    num = min(MOST_AT_ONCE, os.cpu_count() or 1)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--dist",
        "worksteal",
        "-n",
        str(num),
    ]
    command += [f"tests/kernels/{file}.py" for file in FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
