"""Query and key heads on their way from the matrix into attention: normed, turned by their positions (Su et al. 2021,
"RoFormer"), keys and values into their slots of the pool.

A head is three pieces: the two halves that turn into each other, and what does not turn. Each program thread reads what
it will write, so that nothing is overwritten that another still has to read. Sums and angles are float32; where torch
would round to the type of the activations between two steps, so do these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.early import open_next, wait
from worker.triton.stored import coded, scale_of


@triton.jit
def _turned(
    base, norm, cos, sin, heads, eps,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The three pieces of ``heads`` heads that lie at ``base``, f32, rounded to the type of what lies there; the last
    is the first again where everything turns. NORM as for ``turn``; cos and sin: a row.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    h, a, b = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    half_here = (h < heads)[:, None] & (a < HALF)[None, :]
    rest_here = (h < heads)[:, None] & (b < REST)[None, :]
    kind = base.dtype.element_ty
    half_at = h[:, None] * HEAD_DIM + a[None, :]
    rest_at = h[:, None] * HEAD_DIM + ROTARY_DIM + b[None, :]
    left = tl.load(base + half_at, mask=half_here, other=0.0).to(tl.float32)
    right = tl.load(base + half_at + HALF, mask=half_here, other=0.0).to(tl.float32)
    rest = left
    if REST > 0:
        rest = tl.load(base + rest_at, mask=rest_here, other=0.0).to(tl.float32)
    if NORM > 0:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
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
            rest = rest.to(kind).to(tl.float32)
    is_angle = a < HALF
    cos_left = tl.load(cos + a, mask=is_angle, other=0.0)[None, :]
    cos_right = tl.load(cos + a + HALF, mask=is_angle, other=0.0)[None, :]
    sin_left = tl.load(sin + a, mask=is_angle, other=0.0)[None, :]
    sin_right = tl.load(sin + a + HALF, mask=is_angle, other=0.0)[None, :]
    turned_left, turned_right = left * cos_left + right * sin_left, right * cos_right + left * sin_right
    return turned_left.to(kind).to(tl.float32), turned_right.to(kind).to(tl.float32), rest


@triton.jit
def _put_back(
    base, heads, left, right, rest,
    HAS_REST: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The pieces of heads to where they come from; HAS_REST: that one has changed too."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    h, a, b = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    kind = base.dtype.element_ty
    at = base + h[:, None] * HEAD_DIM + a[None, :]
    here = (h < heads)[:, None] & (a < HALF)[None, :]
    tl.store(at, left.to(kind), mask=here)
    tl.store(at + HALF, right.to(kind), mask=here)
    if HAS_REST:
        here = (h < heads)[:, None] & (b < HEAD_DIM - ROTARY_DIM)[None, :]
        tl.store(base + h[:, None] * HEAD_DIM + ROTARY_DIM + b[None, :], rest.to(kind), mask=here)


@triton.jit
def turn(
    qkv, cos, sin, query_norm, key_norm, row_stride, angle_stride, num_heads, num_kv_heads, eps,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 2): the query heads, then the key heads, in place. NORM 0: none, 1: each head by weights [HEAD_DIM],
    2: all together by weights [heads * HEAD_DIM].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = num_heads if part == 0 else num_kv_heads
    norm = query_norm if part == 0 else key_norm
    base = qkv + row * row_stride + part * num_heads * HEAD_DIM
    left, right, rest = _turned(
        base, norm, cos + row * angle_stride, sin + row * angle_stride, heads, eps, NORM, HEAD_DIM, ROTARY_DIM,
        BLOCK_H, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    has_rest: tl.constexpr = NORM > 0 and HEAD_DIM > ROTARY_DIM
    _put_back(base, heads, left, right, rest, has_rest, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_HALF, BLOCK_REST)


@triton.jit
def turn_and_write(
    qkv, cos, sin, query_norm, key_norm, keys, values, key_scales, value_scales, slots, row_stride, angle_stride,
    head_stride, scale_stride, num_heads, num_kv_heads, eps, key_scale, value_scale,
    NORM: tl.constexpr, KEEP: tl.constexpr, PLAIN: tl.constexpr, FLOAT8: tl.constexpr, PER_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 3): the query heads as by ``turn``; the key heads, turned, into the row's slot, and KEEP back to
    where they come from as well; the value heads into it.

    The pool and the rest as for ``attention.write``, which this takes the place of.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    base = qkv + row * row_stride
    cos += row * angle_stride
    sin += row * angle_stride
    changes_rest: tl.constexpr = NORM > 0 and REST > 0
    open_next(EARLY)
    slot = tl.load(slots + row)
    wait(EARLY)
    h = tl.arange(0, BLOCK_KV)
    is_head = h < tl.where(slot < 0, 0, num_kv_heads)
    target = h.to(tl.int64)[:, None] * head_stride + slot * HEAD_DIM
    noted = h.to(tl.int64) * scale_stride + slot
    if part == 0:
        left, right, rest = _turned(
            base, query_norm, cos, sin, num_heads, eps, NORM, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_HALF, BLOCK_REST
        )
        _put_back(
            base, num_heads, left, right, rest, changes_rest, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_HALF, BLOCK_REST
        )
    elif part == 1:
        base += num_heads * HEAD_DIM
        left, right, rest = _turned(
            base, key_norm, cos, sin, num_kv_heads, eps, NORM, HEAD_DIM, ROTARY_DIM, BLOCK_KV, BLOCK_HALF, BLOCK_REST
        )
        if KEEP:
            _put_back(
                base, num_kv_heads, left, right, rest, changes_rest, HEAD_DIM, ROTARY_DIM, BLOCK_KV, BLOCK_HALF,
                BLOCK_REST,
            )  # fmt: skip
        a, b = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
        half_here = is_head[:, None] & (a < HALF)[None, :]
        rest_here = is_head[:, None] & (b < REST)[None, :]
        half_to, rest_to = keys + target + a[None, :], keys + target + ROTARY_DIM + b[None, :]
        if PLAIN:
            kind = keys.dtype.element_ty
            tl.store(half_to, left.to(kind), mask=half_here)
            tl.store(half_to + HALF, right.to(kind), mask=half_here)
            if REST > 0:
                tl.store(rest_to, rest.to(kind), mask=rest_here)
        else:
            scales = tl.zeros([BLOCK_KV], tl.float32) + key_scale
            if PER_TOKEN:
                largest = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
                if REST > 0:
                    largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
                scales = scale_of(largest, FLOAT8)
                tl.store(key_scales + noted, scales, mask=is_head)
            tl.store(half_to, coded(left, scales[:, None], FLOAT8), mask=half_here)
            tl.store(half_to + HALF, coded(right, scales[:, None], FLOAT8), mask=half_here)
            if REST > 0:
                tl.store(rest_to, coded(rest, scales[:, None], FLOAT8), mask=rest_here)
    else:
        base += (num_heads + num_kv_heads) * HEAD_DIM
        d = tl.arange(0, BLOCK_D)
        here = is_head[:, None] & (d < HEAD_DIM)[None, :]
        value = tl.load(base + h[:, None] * HEAD_DIM + d[None, :], mask=here, other=0.0)
        if PLAIN:
            tl.store(values + target + d[None, :], value.to(values.dtype.element_ty), mask=here)
        else:
            wide = value.to(tl.float32)
            scales = tl.zeros([BLOCK_KV], tl.float32) + value_scale
            if PER_TOKEN:
                scales = scale_of(tl.max(tl.abs(wide), 1), FLOAT8)
                tl.store(value_scales + noted, scales, mask=is_head)
            tl.store(values + target + d[None, :], coded(wide, scales[:, None], FLOAT8), mask=here)
