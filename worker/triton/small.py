"""The small operations between the matrices, each in one pass: what ``worker.models.ops`` asks for.

Sums and angles are float32; where torch would round to the type of the activations between two steps, so do these.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_norm(
    x, delta, post, pre, out, size, x_stride, delta_stride, eps,
    HAS_DELTA: tl.constexpr, HAS_POST: tl.constexpr, HAS_PRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows): x grows by delta, normed by post (HAS_POST); out is x normed by pre (HAS_PRE). out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < size
    kind = x.dtype.element_ty
    grown = tl.load(x + row * x_stride + at, mask=here, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + at, mask=here, other=0.0).to(tl.float32)
        if HAS_POST:
            level = tl.rsqrt(tl.sum(added * added, 0) / size + eps)
            added = (added * level * tl.load(post + at, mask=here, other=0.0)).to(kind).to(tl.float32)
        rounded = (grown + added).to(kind)
        tl.store(x + row * x_stride + at, rounded, mask=here)
        grown = rounded.to(tl.float32)
    if HAS_PRE:
        level = tl.rsqrt(tl.sum(grown * grown, 0) / size + eps)
        normed = grown * level * tl.load(pre + at, mask=here, other=0.0)
        tl.store(out + row * size + at, normed.to(kind), mask=here)


@triton.jit
def turn(
    qkv, cos, sin, query_norm, key_norm, row_stride, angle_stride, num_heads, num_kv_heads, eps,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 2): the query heads, then the key heads. NORM 0: none, 1: each head by weights [HEAD_DIM], 2: all
    together by weights [heads * HEAD_DIM].

    A head is three pieces: the two halves that turn into each other, and what does not turn. Each program thread reads
    what it will write, so that nothing is overwritten that another still has to read.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    heads = num_heads if part == 0 else num_kv_heads
    h, a, b = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    base = qkv + row * row_stride + part * num_heads * HEAD_DIM
    half_here = (h < heads)[:, None] & (a < HALF)[None, :]
    rest_here = (h < heads)[:, None] & (b < REST)[None, :]
    kind = qkv.dtype.element_ty
    half_at = h[:, None] * HEAD_DIM + a[None, :]
    rest_at = h[:, None] * HEAD_DIM + ROTARY_DIM + b[None, :]
    left = tl.load(base + half_at, mask=half_here, other=0.0).to(tl.float32)
    right = tl.load(base + half_at + HALF, mask=half_here, other=0.0).to(tl.float32)
    if NORM > 0:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        rest = left
        if REST > 0:
            rest = tl.load(base + rest_at, mask=rest_here, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        norm = query_norm if part == 0 else key_norm
        if NORM == 2:
            level = tl.rsqrt(tl.sum(squares, 0) / (heads * HEAD_DIM) + eps) + squares * 0
            weight_at, rest_weight_at = half_at, rest_at
        else:
            level = tl.rsqrt(squares / HEAD_DIM + eps)
            weight_at, rest_weight_at = half_at - h[:, None] * HEAD_DIM, rest_at - h[:, None] * HEAD_DIM
        left = left * level[:, None] * tl.load(norm + weight_at, mask=half_here, other=0.0)
        right = right * level[:, None] * tl.load(norm + weight_at + HALF, mask=half_here, other=0.0)
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
        if REST > 0:
            rest = rest * level[:, None] * tl.load(norm + rest_weight_at, mask=rest_here, other=0.0)
            tl.store(base + rest_at, rest.to(kind), mask=rest_here)
    angles, is_angle = row * angle_stride + a, a < HALF
    cos_left = tl.load(cos + angles, mask=is_angle, other=0.0)[None, :]
    cos_right = tl.load(cos + angles + HALF, mask=is_angle, other=0.0)[None, :]
    sin_left = tl.load(sin + angles, mask=is_angle, other=0.0)[None, :]
    sin_right = tl.load(sin + angles + HALF, mask=is_angle, other=0.0)[None, :]
    tl.store(base + half_at, (left * cos_left + right * sin_left).to(kind), mask=half_here)
    tl.store(base + half_at + HALF, (right * cos_right + left * sin_right).to(kind), mask=half_here)


@triton.jit
def gate(gate_up, out, size, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, size / BLOCK, rounded up): out [rows, size] = activation(first half) * second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    x = tl.load(gate_up + row * row_stride + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + at, mask=here, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        opened = x / (1.0 + tl.exp2(x * -_LOG2_E))
    elif ACTIVATION == "gelu":
        opened = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(y) is 2 / (1 + exp(-2 y)).
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        opened = x / (1.0 + tl.exp2(inner * (-2.0 * _LOG2_E)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        opened = tl.maximum(x, 0.0)
    tl.store(out + row * size + at, (opened * up).to(out.dtype.element_ty), mask=here)
