"""pytest where kernels have tiles, emulated (see emulated_tiles.h): `python -m tests.worker.with_tiles ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worker.native import build, library

TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-include", str(Path(__file__).with_name("emulated_tiles.h")))

if __name__ == "__main__":
    build.FLAGS = (*build.FLAGS, *TILES)
    kernels = library()
    assert kernels is not None
    assert kernels.has_tiles
    sys.exit(pytest.main(sys.argv[1:]))
