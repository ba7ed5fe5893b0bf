"""Activations rounded to float8, each row by its own largest number, for torch's scaled matrix product."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.float8 import encoded


@triton.jit
def to_float8(x, codes, scales, size, x_stride, BLOCK: tl.constexpr):
    """Grid (rows): codes [rows, size] u8, the bytes of e4m3 numbers, times scales [rows] f32 are nearly x."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.abs(tl.load(x + row * x_stride + at, mask=at < size, other=0.0).to(tl.float32))
        )
    # A row of zeros keeps a scale that can be divided by.
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / 448.0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(codes + row * size + at, encoded(tl.div_rn(numbers, scale)), mask=at < size)
    tl.store(scales + row, scale)
