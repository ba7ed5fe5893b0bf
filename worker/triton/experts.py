"""A mixture of experts on the device alone: which experts a token goes through, its pairs of token and expert sorted by
expert, all experts' matrices in one launch, and what they say summed.

As the field does it (vLLM's fused_moe, SGLang's after it): an expert's pairs fill whole blocks, so that a program reads
one expert's matrix, and there are as many programs as the fullest case has blocks, of which those without one end at
once. No number goes to the host, and a grid follows from the number of tokens, so that a step may be recorded. Nothing
is added up in an order that chance decides: pairs stand in their expert's blocks in their own order, and a token's sum
is over its experts as they were chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.float8 import decoded
from worker.triton.int4 import product_of_group
from worker.triton.small import gated

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def route(
    logits, correction, weights, chosen, num_experts, num_each, scale,
    NUM_CHOSEN: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, NORMED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): logits [tokens, num_experts] f32, NUM_GROUPS of num_each -> weights f32 and chosen i32,
    [tokens, NUM_CHOSEN], the best first; of equals the first is better.
    """
    row = tl.program_id(0).to(tl.int64)
    group, place, slot = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    expert = group[:, None] * num_each + place[None, :]
    is_expert = (group < NUM_GROUPS)[:, None] & (place < num_each)[None, :]
    x = tl.load(logits + row * num_experts + expert, mask=is_expert, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp2(x * -_LOG2_E))
    else:
        powers = tl.exp2((x - tl.max(tl.max(x, 1), 0)) * _LOG2_E)
        scores = tl.div_rn(powers, tl.sum(tl.sum(powers, 1), 0))
    ranked = scores
    if HAS_CORRECTION:
        ranked += tl.load(correction + expert, mask=is_expert, other=0.0)
    # What is no number comes last: whatever a model says, one of its experts is chosen.
    ranked = tl.where(is_expert & (ranked == ranked), ranked, float("-inf"))
    if NUM_GROUPS > 1:
        best = tl.max(ranked, 1)
        if SIGMOID:
            first = tl.min(tl.where(ranked == best[:, None], place[None, :], BLOCK_E), 1)
            best += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), ranked), 1)
        best = tl.where(group < NUM_GROUPS, best, float("-inf"))
        is_open = group < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            at = tl.min(tl.where(best == tl.max(best, 0), group, BLOCK_G), 0)
            is_open |= group == at
            best = tl.where(group == at, float("-inf"), best)
        ranked = tl.where(is_open[:, None], ranked, float("-inf"))
    own, ids = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.int32)
    for each in tl.static_range(NUM_CHOSEN):
        is_best = is_expert & (ranked == tl.max(tl.max(ranked, 1), 0))
        at = tl.min(tl.min(tl.where(is_best, expert, num_experts), 1), 0)
        is_at = is_expert & (expert == at)
        score = tl.sum(tl.sum(tl.where(is_at, scores, 0.0), 1), 0)
        own, ids = tl.where(slot == each, score, own), tl.where(slot == each, at, ids)
        ranked = tl.where(is_at, float("-inf"), ranked)
    if NORMED:
        own = tl.div_rn(own, tl.sum(own, 0) + 1e-20)  # as LEAST_SUM
    out = row * NUM_CHOSEN + slot
    tl.store(weights + out, own * scale, mask=slot < NUM_CHOSEN)
    tl.store(chosen + out, ids, mask=slot < NUM_CHOSEN)


# These change from step to step, and the kernel is the same: 1 or a multiple of 16 is nothing to it.
@triton.jit(do_not_specialize=("num_pairs", "max_blocks"))
def sort(
    chosen, order, owners, num_pairs, max_blocks, BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Grid (num_experts): chosen [num_pairs] i32 -> order [max_blocks * BLOCK_M] i32, pairs by expert, each expert's
    filled up to whole blocks with num_pairs, and owners [max_blocks + 1] i32, the expert of each block, then how many
    blocks there are; what is behind these is left as it was.
    """
    expert = tl.program_id(0)
    bins, lane = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        counts += tl.histogram(tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=0), BINS)
    # What filled up the last chunk was counted with the first expert's.
    counts -= tl.where(bins == 0, tl.cdiv(num_pairs, CHUNK) * CHUNK - num_pairs, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    stop = first + tl.sum(tl.where(bins == expert, blocks, 0), 0)
    for start in range(first, stop, BINS):
        tl.store(owners + start + bins, tl.zeros([BINS], tl.int32) + expert, mask=start + bins < stop)
    if expert == 0:
        tl.store(owners + max_blocks, tl.sum(blocks, 0))
    place = first * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        is_own = tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=-1) == expert
        ones = is_own.to(tl.int32)
        tl.store(order + place + tl.cumsum(ones, 0) - 1, start + lane, mask=is_own)
        place += tl.sum(ones, 0)
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(order + rest, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=rest < stop * BLOCK_M)


@triton.jit
def _with_product(
    total, matrices, scales, offsets, row, start, inputs, is_output, is_input, num_inputs,
    GROUP: tl.constexpr, MULTIPLY: tl.constexpr, FLOAT8: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total [outputs, pairs] and what BLOCK_K inputs from start on add to it, [pairs, BLOCK_K], by these rows."""
    if GROUP > 0:
        half = tl.arange(0, GROUP // 2)
        codes_at = matrices + row[:, None] * (num_inputs // 2) + start // 2 + half[None, :]
        packed = tl.load(codes_at, mask=is_output[:, None], other=0)
        at = row * (num_inputs // GROUP) + start // GROUP
        scale = tl.load(scales + at, mask=is_output, other=0.0)
        offset = tl.load(offsets + at, mask=is_output, other=0.0)
        return total + product_of_group(packed, inputs, scale, offset, MULTIPLY)
    at = row[:, None] * num_inputs + (start + tl.arange(0, BLOCK_K))[None, :]
    own = tl.load(matrices + at, mask=is_output[:, None] & is_input[None, :], other=0.0)
    return tl.dot(decoded(own, MULTIPLY, FLOAT8), tl.trans(inputs.to(MULTIPLY)), total, input_precision="ieee")


@triton.jit(do_not_specialize=("num_pairs", "max_blocks"))
def multiply(
    matrices, scales, offsets, bias, x, order, owners, factors, y, num_pairs, max_blocks, num_outputs, num_inputs,
    x_stride,
    PAIRS_EACH: tl.constexpr, ACTIVATION: tl.constexpr, MULTIPLY: tl.constexpr, FLOAT8: tl.constexpr,
    GROUP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (num_outputs / BLOCK_N, rounded up; max_blocks): y [num_pairs, num_outputs], each row of x, x_stride apart,
    times its expert's matrix; a row of x is for PAIRS_EACH pairs.

    matrices [num_experts, out, num_inputs], scales and bias [num_experts, out]; where inputs share a scale and an
    offset, GROUP of them, which BLOCK_K then is, matrices are four-bit codes, two a byte, and scales and offsets
    [num_experts, out, num_inputs / GROUP]. out is num_outputs, or with an ACTIVATION ("" is none) twice that: gates,
    and what they open. factors [num_pairs] f32 of what comes out. ``sort``
    makes order and owners.
    """
    block = tl.program_id(1)
    if block >= tl.load(owners + max_blocks):
        return
    expert = tl.load(owners + block).to(tl.int64)
    pair = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_output, is_pair = n < num_outputs, pair < num_pairs
    num_rows = num_outputs if ACTIVATION == "" else 2 * num_outputs
    row = expert * num_rows + n
    x_at = x + (pair // PAIRS_EACH).to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Weights stand on the left of the product, where Hopper's tensor cores want 64 rows; pairs may be few.
    for start in range(0, num_inputs, BLOCK_K):
        is_input = start + k < num_inputs
        inputs = tl.load(x_at + start, mask=is_pair[:, None] & is_input[None, :], other=0.0)
        total = _with_product(
            total, matrices, scales, offsets, row, start, inputs, is_output, is_input, num_inputs,
            GROUP, MULTIPLY, FLOAT8, BLOCK_K,
        )  # fmt: skip
        if ACTIVATION != "":
            ups = _with_product(
                ups, matrices, scales, offsets, row + num_outputs, start, inputs, is_output, is_input, num_inputs,
                GROUP, MULTIPLY, FLOAT8, BLOCK_K,
            )  # fmt: skip
    if HAS_SCALES:
        total *= tl.load(scales + row, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        if HAS_SCALES:
            ups *= tl.load(scales + row + num_outputs, mask=is_output, other=0.0)[:, None]
        if HAS_BIAS:
            ups += tl.load(bias + row + num_outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        total = gated(total, ups, ACTIVATION)
    if HAS_FACTORS:
        total *= tl.load(factors + pair, mask=is_pair, other=0.0)[None, :]
    here = is_output[:, None] & is_pair[None, :]
    tl.store(y + pair.to(tl.int64)[None, :] * num_outputs + n[:, None], total.to(y.dtype.element_ty), mask=here)


@triton.jit
def combine(parts, y, size, NUM_EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens; size / BLOCK, rounded up): y [tokens, size], the sums of parts [tokens, NUM_EACH, size]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for each in tl.static_range(NUM_EACH):
        total += tl.load(parts + (row * NUM_EACH + each) * size + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row * size + at, total.to(y.dtype.element_ty), mask=here)
