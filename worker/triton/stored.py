"""Numbers as the pool keeps them where they take one byte: multiples of a scale, in float8 or int8.

FLOAT8 0 stands for int8 here; otherwise the bytes of e4m3 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.float8 import encoded
from worker.triton.int8 import nearest


@triton.jit
def scale_of(largest, FLOAT8: tl.constexpr):
    """Of numbers up to ``largest``, f32, which becomes the largest code."""
    # Numbers that are all 0 keep a scale that can be divided by.
    largest = tl.maximum(largest, 1e-12)
    most: tl.constexpr = 127.0 if FLOAT8 == 0 else 448.0
    return largest / most


@triton.jit
def coded(x, scale, FLOAT8: tl.constexpr):
    """f32 -> the nearest code, i8 or u8."""
    return nearest(tl.div_rn(x, scale)) if FLOAT8 == 0 else encoded(tl.div_rn(x, scale))
