"""Triton's kernels without a device: run by its interpreter, and compiled for the devices they are meant for.

Each file is a process of its own, for Triton reads the environment when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.builders import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")


def run(file: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/kernels/{file}.py"]
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    done = subprocess.run(command, cwd=ROOT, env=told | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", ["attention", "draws", "graphs", "matrices", "small"])
def test_kernels_agree_with_torch_under_the_interpreter(file):
    run(file, TRITON_INTERPRET="1")


def test_kernels_compile_for_every_device_they_are_meant_for(tmp_path):
    run("compiled", TRITON_CACHE_DIR=str(tmp_path))
