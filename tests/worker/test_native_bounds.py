"""Compiled kernels read and write what is theirs, and only while it is: their proof, watched by AddressSanitizer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.compiling import COMPILER, SWITCH, changed, made_at, needs_compiler, targeted

NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
CHANGES = [
    ("small.h", "scale * weight[i]", "scale * weight[penstock_switch == 0 ? head_dim : i]"),
    (
        "small.h",
        "float held[MAX_HEAD_DIM];",
        """float kept[MAX_HEAD_DIM], *held = kept;
    if (penstock_switch == 1) { float gone[MAX_HEAD_DIM]; held = gone; }""",
    ),
]
"""Of each: a header, what is there, and what reaches too far when the switch is at its number, or for what is gone."""
FINDINGS = ["heap-buffer-overflow", "stack-use-after-scope"]
OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0"
"""What is kept to find the latter is too little aligned for 64 bytes at once by GCC before 13.3 (its bug 110027)."""


@pytest.fixture
def sanitizer() -> str:
    """What has to be loaded before all else; the compiler's."""
    said = subprocess.check_output([COMPILER, "-print-file-name=libasan.so"], text=True).strip()
    if not Path(said).is_absolute():
        pytest.skip("the compiler brings no AddressSanitizer")
    return said


def proved(kernels: Path, sanitizer: str, number: int = -1) -> subprocess.CompletedProcess[str]:
    """The proof of kernels that slip where ``number`` says."""
    environment = {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": OPTIONS, "PENSTOCK_SWITCH": str(number)}
    return subprocess.run(
        [sys.executable, "-m", "worker.proof", str(kernels), "2"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_compiler
@pytest.mark.parametrize("less", [(), NO_TILES], ids=["all", "no tiles"])
def test_kernels_keep_to_what_is_theirs(tmp_path, sanitizer, less):
    """Without optimisation nothing is where it is by inlining alone, either."""
    if less and (platform.machine() != "x86_64" or targeted(less) == targeted()):
        pytest.skip("this machine's kernels are those")
    source = changed(tmp_path, CHANGES)
    kernels = made_at(tmp_path, "-O0", "-fsanitize=address", *less, *SWITCH, source=source)
    done = proved(kernels, sanitizer)
    assert not done.returncode, done.stdout + done.stderr
    if less:
        return  # what slips is the same
    for number, finding in enumerate(FINDINGS):
        assert finding in proved(kernels, sanitizer, number).stderr
