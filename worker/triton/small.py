"""The small operations between the matrices, each in one pass: what ``worker.models.ops`` asks for, but for what is
done to heads.

Sums are float32; where torch would round to the type of the activations between two steps, so do these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.early import open_next, wait

_LOG2_E = tl.constexpr(1.4426950408889634)
_ALPHA, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)
"""Of the clamped SwiGLU."""


@triton.jit
def add_norm(
    x, delta, post, pre, out, size, x_stride, delta_stride, eps,
    HAS_DELTA: tl.constexpr, HAS_POST: tl.constexpr, HAS_PRE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows): x grows by delta, normed by post (HAS_POST); out is x normed by pre (HAS_PRE). out is contiguous."""
    open_next(EARLY)
    wait(EARLY)
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
def gated(x, up, ACTIVATION: tl.constexpr):
    """activation(x) * up, all f32, see Ops."""
    if ACTIVATION == "silu":
        opened = x / (1.0 + tl.exp2(x * -_LOG2_E))
    elif ACTIVATION == "gelu":
        opened = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(y) is 2 / (1 + exp(-2 y)).
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        opened = x / (1.0 + tl.exp2(inner * (-2.0 * _LOG2_E)))
    elif ACTIVATION == "clamped_swiglu":
        x = tl.where(x > _LIMIT, _LIMIT, x)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        opened = x / (1.0 + tl.exp2(x * (-_ALPHA * _LOG2_E)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        opened = tl.maximum(x, 0.0)
    return opened * up


@triton.jit
def gate(gate_up, out, size, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid (rows, size / BLOCK, rounded up): out [rows, size] = activation(first half) * second half, see Ops."""
    open_next(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    x = tl.load(gate_up + row * row_stride + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, gated(x, up, ACTIVATION).to(out.dtype.element_ty), mask=here)
