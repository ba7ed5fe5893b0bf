"""A matrix of one-byte codes, int8 or float8, whose rows have a scale each, times some tokens.

The codes are read as they lie and widened in registers, where any type of activations holds them exactly; what they add
up to is scaled at the end. With few tokens the inputs are dealt to several programs, as in ``worker.triton.int4``.

With many tokens int8 is multiplied as integers by torch. ``rows.to_codes`` rounds the tokens for that, ``rescale``
makes of the sums what they stand for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.float8 import decoded


# These change from step to step, and the kernel is the same: 1 or a multiple of 16 is nothing to it.
@triton.jit(do_not_specialize=("num_tokens", "blocks_each"))
def multiply(
    codes, scales, x, bias, y, num_tokens, num_outputs, num_inputs, x_stride, blocks_each,
    MULTIPLY: tl.constexpr, FLOAT8: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (num_outputs / BLOCK_N, num_tokens / BLOCK_M, splits), rounded up.

    codes [num_outputs, num_inputs], scales [num_outputs] f32, x: rows x_stride apart; y [num_tokens, num_outputs], or,
    SPLIT, [splits, num_tokens, num_outputs] f32: of blocks_each blocks of BLOCK_K inputs a split.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    is_output, is_token = n < num_outputs, m < num_tokens
    code_at = codes + n.to(tl.int64)[:, None] * num_inputs + k[None, :]
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * blocks_each
    for block in range(first, tl.minimum(first + blocks_each, tl.cdiv(num_inputs, BLOCK_K))):
        start = block * BLOCK_K
        is_input = (start + k < num_inputs)[None, :]
        narrow = tl.load(code_at + start, mask=is_output[:, None] & is_input, other=0.0)
        inputs = tl.load(x_at + start, mask=is_token[:, None] & is_input, other=0.0)
        weights = decoded(narrow, MULTIPLY, FLOAT8)
        total = tl.dot(weights, tl.trans(inputs.to(MULTIPLY)), total, input_precision="ieee")
    total *= tl.load(scales + n, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    row = m.to(tl.int64)
    if SPLIT:
        row += split.to(tl.int64) * num_tokens
    here = is_output[:, None] & is_token[None, :]
    tl.store(y + row[None, :] * num_outputs + n[:, None], total.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=("x_scales",))
def rescale(sums, x_scales, scales, bias, y, num_outputs, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, num_outputs / BLOCK, rounded up): sums [rows, num_outputs] i32 into y, each times the scale of its
    row, x_scales [rows], and of its output, scales [num_outputs].
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_outputs
    total = tl.load(sums + row * num_outputs + at, mask=here, other=0).to(tl.float32)
    total *= tl.load(scales + at, mask=here, other=0.0) * tl.load(x_scales + row)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * num_outputs + at, total.to(y.dtype.element_ty), mask=here)
