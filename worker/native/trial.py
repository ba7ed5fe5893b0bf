"""Whether matrices in twelve bits a weight pay on this machine: tried once, and kept beside the compiled kernels."""

from __future__ import annotations

import logging
import math
import os
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from worker.native.library import Library
from worker.native.packed import PackedMatrix

log = logging.getLogger(__name__)

ROWS = (1, 4, 8, 32)
"""That are multiplied, each as important as the others."""
COLUMNS, SIZE = 8192, 4096
"""64 MiB in bfloat16: more than most machines have for two cores in a cache."""
NUM_TURNS = 7


@cache
def coding_pays(library: Library) -> bool:
    """Whether few rows are multiplied faster, all in all, by what is coded (see Library.code)."""
    if not library.has_linear:
        return False
    path = Path(f"{library.path.removesuffix('.so')}-coded-{torch.get_num_threads()}.txt")
    try:
        return float(path.read_text()) > 1.0
    except (OSError, ValueError):
        gain = gain_of_coding(library)
    log.debug("weights of bfloat16 in twelve bits are %.2f times as fast here as in sixteen", gain)
    try:
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text(f"{gain}\n")
        made.replace(path)
    except OSError as error:
        log.warning("that is found out again at the next start: %s", error)
    return gain > 1.0


def gain_of_coding(library: Library, columns: int = COLUMNS, size: int = SIZE) -> float:
    """How many times as fast, in the geometric mean of ROWS, both tried in turn and the best of each counted; 0 where
    nothing can be coded."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        weight = torch.randn((columns, size), generator=generator, dtype=torch.bfloat16)
        plain, coded = PackedMatrix(weight, None, False), PackedMatrix(weight, None, False, library.code)
        if not coded.is_coded:
            return 0.0
        gains: list[float] = []
        for num_rows in ROWS:
            x = torch.randn((num_rows, size), generator=generator, dtype=torch.bfloat16)
            turns = [[_seconds(library, x, matrix) for matrix in (plain, coded)] for _ in range(NUM_TURNS)]
            of_plain, of_coded = (min(each) for each in zip(*turns, strict=True))
            gains.append(of_plain / of_coded)
    return math.exp(sum(map(math.log, gains)) / len(gains))


def _seconds(library: Library, x: Tensor, matrix: PackedMatrix) -> float:
    began_at = time.perf_counter()
    library.linear(x, matrix, torch.bfloat16)
    return time.perf_counter() - began_at
