"""A compiler for tests of kernels, and how much it is asked."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from worker.native import Library, build, library

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
