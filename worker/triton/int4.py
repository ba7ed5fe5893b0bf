"""A matrix of four-bit codes times a few or many tokens, the codes unpacked in registers.

A group's codes are multiplied before they are scaled: put into the last bits of a number's mantissa, code c is
128 + c in bfloat16 (1024 + c in float16) without any arithmetic, and exact. So

    sum over a group of x * (c * scale + offset) = scale * (sum of x * (128 + c)) + (offset - 128 * scale) * (sum of x)

Weights stand on the left of the product, where Hopper's tensor cores take registers. With few tokens, too few tiles of
outputs would keep the device busy, so that the inputs are dealt to several programs; their sums are added in a fixed
order, so that equal inputs give equal outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_of_group(packed, inputs, scale, offset, MULTIPLY: tl.constexpr):
    """Of one group: codes, packed [outputs, group / 2] u8, scale and offset [outputs] f32, and inputs [tokens, group]
    -> [outputs, tokens] f32."""
    wide = tl.interleave(packed & 15, packed >> 4).to(tl.uint16)
    if inputs.dtype == tl.bfloat16:
        weights = (wide | 0x4300).to(tl.bfloat16, bitcast=True).to(MULTIPLY)
        offset -= 128.0 * scale
    elif inputs.dtype == tl.float16:
        weights = (wide | 0x6400).to(tl.float16, bitcast=True).to(MULTIPLY)
        offset -= 1024.0 * scale
    else:
        weights = wide.to(tl.float32)
    products = tl.dot(weights, tl.trans(inputs.to(MULTIPLY)), input_precision="ieee")
    sums = tl.sum(inputs.to(tl.float32), 1)
    return products * scale[:, None] + offset[:, None] * sums[None, :]


# These change from step to step, and the kernel is the same: 1 or a multiple of 16 is nothing to it.
@triton.jit(do_not_specialize=("num_tokens", "groups_each"))
def multiply(
    codes, scales, offsets, x, bias, y, num_tokens, num_outputs, num_inputs, x_stride, groups_each,
    GROUP: tl.constexpr, MULTIPLY: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (num_outputs / BLOCK_N, num_tokens / BLOCK_M, splits), rounded up.

    codes [num_outputs, num_inputs / 2] u8, scales and offsets [num_outputs, num_inputs / GROUP], x: rows x_stride
    apart; y [num_tokens, num_outputs], or, SPLIT, [splits, num_tokens, num_outputs] f32: of groups_each groups a split.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_output, is_token = n < num_outputs, m < num_tokens
    num_groups = num_inputs // GROUP
    pair, k = tl.arange(0, GROUP // 2), tl.arange(0, GROUP)
    code_at = codes + n.to(tl.int64)[:, None] * (num_inputs // 2) + pair[None, :]
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    group_at = n.to(tl.int64) * num_groups
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * groups_each
    for g in range(first, tl.minimum(first + groups_each, num_groups)):
        packed = tl.load(code_at + g * (GROUP // 2), mask=is_output[:, None], other=0)
        inputs = tl.load(x_at + g * GROUP, mask=is_token[:, None], other=0.0)
        scale = tl.load(scales + group_at + g, mask=is_output, other=0.0).to(tl.float32)
        offset = tl.load(offsets + group_at + g, mask=is_output, other=0.0).to(tl.float32)
        total += product_of_group(packed, inputs, scale, offset, MULTIPLY)
    here = is_output[:, None] & is_token[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    row = m.to(tl.int64)
    if SPLIT:
        row += split.to(tl.int64) * num_tokens
    tl.store(y + row[None, :] * num_outputs + n[:, None], total.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=("num_numbers", "num_splits"))
def add_up(parts, bias, y, num_numbers, num_outputs, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (num_numbers / BLOCK, rounded up): parts [num_splits, num_numbers] f32 and bias into y [num_numbers]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_numbers
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, num_splits):
        total += tl.load(parts + split * num_numbers.to(tl.int64) + at, mask=here, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here)


@triton.jit
def unpack(
    codes, scales, offsets, weights, num_outputs, num_inputs, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Grid (num_outputs / BLOCK_N, rounded up; num_inputs / GROUP): weights [num_outputs, num_inputs]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.program_id(1)
    is_output = n < num_outputs
    pair, k = tl.arange(0, GROUP // 2), tl.arange(0, GROUP)
    row = n.to(tl.int64)
    packed = tl.load(
        codes + row[:, None] * (num_inputs // 2) + g * (GROUP // 2) + pair[None, :], mask=is_output[:, None], other=0
    )
    at = row * (num_inputs // GROUP) + g
    scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
    offset = tl.load(offsets + at, mask=is_output, other=0.0).to(tl.float32)
    wide = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    dense = wide * scale[:, None] + offset[:, None]
    tl.store(
        weights + row[:, None] * num_inputs + g * GROUP + k[None, :], dense.to(weights.dtype.element_ty),
        mask=is_output[:, None],
    )  # fmt: skip
