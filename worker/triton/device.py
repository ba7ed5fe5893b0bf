"""What kernels are told about where they run."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.triton.float8 import FLOAT8_BYTES, FLOAT8_NATIVE

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run on the CPU, as Python (TRITON_INTERPRET=1)."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def multiplies(x: Tensor) -> tl.dtype:
    """The type that tensor cores are given for activations like x. The interpreter has no bfloat16 arithmetic, and
    multiplies float32.
    """
    return tl.float32 if INTERPRETED else _TYPES[x.dtype]


def float8_as(x: Tensor) -> tuple[int, torch.dtype]:
    """How kernels read x, see ``worker.triton.float8``, and as which type it is to be handed to them."""
    if x.dtype is not torch.float8_e4m3fn:
        return 0, x.dtype
    # For sm_89, whose instructions make float16 alone of it, Triton 3.6 writes bfloat16's of sm_90.
    if INTERPRETED or triton.runtime.driver.active.get_current_target().arch < 90:
        return FLOAT8_BYTES, torch.uint8
    return FLOAT8_NATIVE, x.dtype


@cache
def num_processors(device: torch.device) -> int:
    """Programs that run at once, but for a small factor."""
    return (
        8
        if INTERPRETED or device.type == "cpu"
        else int(torch.cuda.get_device_properties(device).multi_processor_count)
    )
