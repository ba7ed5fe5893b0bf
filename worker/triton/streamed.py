"""A matrix times very few rows, with what comes before and behind it: the norm of the rows, the gate between two
halves, the sum with what is there already.

The matrix is read once, as it lies, and takes all of the time; so whatever else a layer does is done on the way, and
nothing is launched for it. RMSNorm's scale is one number a row, which waits until the sums are there: the squares are
added up beside them. Products are float32; where torch would round to the type of the activations between two steps so
do these, but for rows that are normed, which are not rounded in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.early import open_next, wait
from worker.triton.float8 import decoded
from worker.triton.small import gated


@triton.jit
def stream(
    matrix, scales, bias, x, norm, y, num_outputs, num_inputs, x_stride, y_stride, eps,
    ROWS: tl.constexpr, FLOAT8: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr, ADDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (num_outputs / BLOCK_N, rounded up): y [ROWS, num_outputs] = x [ROWS, num_inputs] times matrix, transposed.

    matrix [num_outputs, num_inputs], SCALED: codes, a row times scales [num_outputs] f32; HAS_BIAS: and bias
    [num_outputs]. NORMED: x by norm [num_inputs] f32. ADDS: y grows by it. ACTIVATION: there are twice as many rows in
    matrix, scales and bias as outputs, and the first half of them opens the second.
    STAGES: pieces of the matrix under way at once; 1: straight into registers.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    # The two rows of an output stand beside each other here.
    place = tl.arange(0, HALVES * BLOCK_N)
    n = tl.program_id(0) * BLOCK_N + place // HALVES
    is_row = n < num_outputs
    row = n + place % HALVES * num_outputs
    k = tl.arange(0, BLOCK_K)
    here = matrix + row.to(tl.int64)[:, None] * num_inputs + k[None, :]
    open_next(EARLY)
    wait(EARLY)
    totals = (tl.zeros([HALVES * BLOCK_N, BLOCK_K], tl.float32),) * ROWS
    squares = (tl.zeros([BLOCK_K], tl.float32),) * ROWS
    for start in tl.range(0, num_inputs, BLOCK_K, num_stages=STAGES):
        is_input = start + k < num_inputs
        weights = decoded(
            tl.load(here + start, mask=is_row[:, None] & is_input[None, :], other=0.0), tl.float32, FLOAT8
        )
        if NORMED:
            gain = tl.load(norm + start + k, mask=is_input, other=0.0)
        grown, grown_squares = (), ()
        for at in tl.static_range(ROWS):
            inputs = tl.load(x + at * x_stride + start + k, mask=is_input, other=0.0).to(tl.float32)
            if NORMED:
                grown_squares += (squares[at] + inputs * inputs,)  # type: ignore[assignment]
                inputs *= gain
            grown += (totals[at] + weights * inputs[None, :],)  # type: ignore[assignment]
        totals = grown
        if NORMED:
            squares = grown_squares
    for at in tl.static_range(ROWS):
        sums = tl.sum(totals[at], 1)
        if NORMED:
            sums *= tl.rsqrt(tl.sum(squares[at], 0) / num_inputs + eps)
        if SCALED:
            sums *= tl.load(scales + row, mask=is_row, other=0.0)
        if HAS_BIAS:
            sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
        sums = sums.to(y.dtype.element_ty)
        out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = out < num_outputs
        if HALVES == 2:
            opened, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
            sums = gated(opened.to(tl.float32), up.to(tl.float32), ACTIVATION)
        to = y + at * y_stride + out
        if ADDS:
            sums = sums.to(tl.float32) + tl.load(to, mask=is_output, other=0.0).to(tl.float32)
        tl.store(to, sums.to(y.dtype.element_ty), mask=is_output)
