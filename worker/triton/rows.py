"""Activations rounded to one byte, each row by its own largest number, for torch's products of such matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.stored import coded, scale_of


@triton.jit
def to_codes(x, codes, scales, size, x_stride, FLOAT8: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows): codes [rows, size], of the kind that FLOAT8 says (see ``stored``), times scales [rows] f32 are
    nearly x.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.abs(tl.load(x + row * x_stride + at, mask=at < size, other=0.0).to(tl.float32))
        )
    scale = scale_of(tl.max(largest, 0), FLOAT8)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(codes + row * size + at, coded(numbers, scale, FLOAT8), mask=at < size)
    tl.store(scales + row, scale)
