"""Triton's kernels without a device: compiled for the devices they are meant for. Steps are given to a device that is
imagined, and what draws is run as it was compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.kernels.processes import Running, passed, running

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")]

COMPILED = (("compiled", "unwaited"), ("executed",))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    caches = {files: {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))} for files in COMPILED}
    with running(caches) as each:
        yield each


@pytest.mark.parametrize("files", COMPILED, ids="-".join)
def test_kernels_compile_for_every_device_they_are_meant_for(compiled, files):
    passed(compiled[files])
