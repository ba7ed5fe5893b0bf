"""Triton's kernels without a device: run by its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.kernels.processes import Running, passed, running

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")]

INTERPRETED = (
    ("graphs", "small", "turned", "matrices", "draws"),
    ("experts", "mixtures", "streamed", "far"),
    ("attention", "windows", "pretended"),
)
"""Files that one process runs."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Running]:
    with running({files: {"TRITON_INTERPRET": "1"} for files in INTERPRETED}) as each:
        yield each


@pytest.mark.parametrize("files", INTERPRETED, ids="-".join)
def test_kernels_agree_with_torch_under_the_interpreter(interpreted, files):
    passed(interpreted[files])
