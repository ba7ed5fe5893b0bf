"""A compiler for tests of kernels, and how much it is asked."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from worker.native import Library, build, library
from worker.native.build import built, in_parallel

COMPILER = os.environ.get("CXX") or "g++"
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler here")


def kernels() -> Library:
    loaded = library()
    if loaded is None:
        pytest.skip("the kernels cannot be built here")
    return loaded


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PROCESSORS = {"x86-64-v3": "avx2", "x86-64": "sse2"}
"""What kernels are compiled for besides, and what this processor has to have for that."""


def elsewhere_at(processor: str, directory: Path) -> Library:
    """The kernels as one with less gets them."""
    flag = PROCESSORS[processor]
    if platform.machine() != "x86_64":
        pytest.skip("this is no x86")
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {flag}")
    path = directory / "kernels.so"
    # With -O3 the compiler takes longer than all else here.
    options = ["-O1" if option == "-O3" else option for option in build.FLAGS if not option.startswith("-march")]
    for parallel in (in_parallel(), ()):
        command = [COMPILER, *options, f"-march={processor}", *parallel, "-o", str(path), str(build.SOURCE)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            break
    return Library(str(path))


def optimise(monkeypatch, level):
    """As much as this: with -O3 the compiler takes longer than all else here."""
    monkeypatch.setattr(build, "FLAGS", tuple(level if flag == "-O3" else flag for flag in build.FLAGS))


SWITCH = ("-include", str(Path(__file__).with_name("switch.h")))


def switch(library: Library) -> ctypes.c_int:
    """Of kernels that were built with it, see switch.h."""
    return ctypes.c_int.in_dll(ctypes.CDLL(library.path), "penstock_switch")


def changed(directory: Path, changes: list[tuple[str, str, str]]) -> Path:
    """The kernels' source there, with something else at some places of some headers."""
    source = shutil.copytree(build.SOURCE.parent, directory / "native")
    for name, place, other in changes:
        text = (source / name).read_text()
        assert place in text
        (source / name).write_text(text.replace(place, other))
    return source / build.SOURCE.name


def targeted(less: tuple[str, ...] = ()) -> bytes:
    """What the compiler says of the machine that it compiles for."""
    return subprocess.check_output([COMPILER, *build.FLAGS, *less, "-dM", "-E", "-x", "c++", os.devnull])


def made(directory: Path, level: str, *flags: str, source: Path = build.SOURCE) -> Library:
    """Kernels of tests of their own."""
    return Library(str(made_at(directory, level, *flags, source=source)))


def made_at(directory: Path, level: str, *flags: str, source: Path = build.SOURCE) -> Path:
    """Where they lie, not loaded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(directory))
        optimise(patched, level)
        patched.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        patched.setattr(build, "SOURCE", source)
        return built()
