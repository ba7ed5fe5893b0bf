"""A compiler for tests of kernels, and how much it is asked."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from worker.native import Library, build, library
from worker.native.build import built

COMPILER = os.environ.get("CXX") or "g++"
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler here")


def kernels() -> Library:
    loaded = library()
    if loaded is None:
        pytest.skip("the kernels cannot be built here")
    return loaded


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
