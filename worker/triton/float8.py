"""float8 e4m3 inside kernels, written out in bits: devices before sm_90 have no instructions that make bfloat16 of it,
and every device rounds alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT8_BYTES = 1
FLOAT8_NATIVE = 2
"""How a float8 tensor is handed to a kernel: as bytes, or as what the device knows (sm_90 and later). 0: it is none."""


@triton.jit
def decoded(x, TO: tl.constexpr, FLOAT8: tl.constexpr):
    """What was loaded, as TO. NaN is not told apart: ``encoded`` makes none."""
    if FLOAT8 == 1:
        wide = x.to(tl.uint16)
        # The bits of a float16 whose exponent is 8 too small, subnormal numbers included.
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(TO)
    return x.to(TO)


@triton.jit
def encoded(x):
    """f32 -> the byte of the nearest e4m3 number, ties to even; beyond 448 it is 448."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9: adding 2**23 rounds to whole ones.
    small = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    return (sign | tl.where(size < 0.015625, small, normal)).to(tl.uint8)
