"""Paged attention in Triton: one program for a tile of query rows, a KV head and a split of the keys it sees.

One launch serves decodes, drafts to verify and chunks of prompts alike. A tile holds the query heads that share a KV
head, for as many neighbouring tokens of one sequence as fit: even a decode then fills some of the 16 rows that tensor
cores multiply at once. Where tiles are few and contexts long, the keys of a tile are dealt to several programs, whose
partial results ``reduce`` merges by their log-sum-exp (Dao et al. 2023, "Flash-Decoding"). How many is read from device
memory, so that a captured graph serves every length: programs without work leave at once, and what they would have
written is never read.

Owns the arithmetic; which tiles and splits there are is decided in ``worker.attention.paged``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.triton.early import open_next, wait
from worker.triton.float8 import decoded
from worker.triton.stored import coded, scale_of

ITEM_FIELDS = tl.constexpr(3)
"""Numbers an item of work: extent (-1: no work), the tile's first token in it, split."""
EXTENT_FIELDS = tl.constexpr(6)
"""Numbers an extent: first row, number of tokens, position of the first, where in the tables its blocks begin, most
splits of a tile, where in the scratch its partial results begin."""

STEP = ("items", "extents", "tables")
"""Parts of one upload, aligned anyhow: else the kernels would be compiled anew for some steps."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _reach(extent, first, WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """What the tile at token ``first`` sees: keys [begin, end), in num_blocks blocks of BLOCK_N, of which each of
    num_splits programs takes per_split, LEAST of them or more."""
    num_tokens, start, most = tl.load(extent + 1), tl.load(extent + 2), tl.load(extent + 4)
    end = start + tl.minimum(first + TOKENS, num_tokens)
    begin = end * 0
    if WINDOW > 0:
        # At a whole block, so that a split's share does not move with every token.
        begin = tl.maximum(start + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(end - begin, BLOCK_N)
    # Of padding there are no splits.
    per_split = tl.maximum(tl.cdiv(num_blocks, tl.maximum(most, 1)), tl.where(most > 1, LEAST, 1))
    return begin, end, num_blocks, per_split, tl.cdiv(num_blocks, per_split)


@triton.jit
def _seen(
    q, high, total, mixed, keys, values, key_scales, value_scales, table, positions, begin, seen, end, scale,
    MULTIPLY: tl.constexpr, FLOAT8: tl.constexpr, PER_TOKEN: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of keys and values, from position ``begin`` on, into the running maximum, sum and mixture: of those in
    [seen, end), for others may be a stranger's, or nobody's, and hold NaN."""
    at = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    here = at < end
    if WINDOW > 0:
        here = here & (at >= seen)
    block = tl.load(table + at // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + at % BLOCK_SIZE
    k_here, v_here = here[None, :] & (d < HEAD_DIM)[:, None], here[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(keys + slots[None, :] * HEAD_DIM + d[:, None], mask=k_here, other=0.0)
    v = tl.load(values + slots[:, None] * HEAD_DIM + d[None, :], mask=v_here, other=0.0)
    k, v = decoded(k, MULTIPLY, FLOAT8), decoded(v, MULTIPLY, FLOAT8)

    scores = tl.dot(q, k, input_precision="ieee") * scale
    if PER_TOKEN:
        scores *= tl.load(key_scales + slots, mask=here, other=0.0)[None, :]
    if SOFTCAP > 0:
        # tanh, of which there is none in the language; the exponent is never positive, so nothing overflows.
        shrunk = tl.exp2(tl.abs(scores) * (-2 * _LOG2_E / SOFTCAP))
        capped = SOFTCAP * (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -capped, capped)
    scores *= _LOG2_E
    if MASKED:
        visible = here[None, :] & (at[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))

    higher = tl.maximum(high, tl.max(scores, 1))
    # A row that has seen nothing yet is at -inf, and -inf - -inf is NaN.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    kept = tl.exp2(high - level)
    weights = tl.exp2(scores - level[:, None])
    total = total * kept + tl.sum(weights, 1)
    if PER_TOKEN:
        weights *= tl.load(value_scales + slots, mask=here, other=0.0)[None, :]
    mixed = tl.dot(weights.to(MULTIPLY), v, mixed * kept[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=STEP)
def attend(
    queries, keys, values, key_scales, value_scales, sinks, out, partial, sums, items, extents, tables, query_stride,
    head_stride, scale_stride, scale, value_scale,
    MULTIPLY: tl.constexpr, FLOAT8: tl.constexpr, PER_TOKEN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (items, KV heads).

    queries: rows query_stride apart, heads HEAD_DIM; keys, values: one layer, heads head_stride apart, slots HEAD_DIM;
    key_scales, value_scales (PER_TOKEN): heads scale_stride apart, a number each slot; sinks (SINKS) [heads] f32: see
    Scores; out [rows, heads, HEAD_DIM]; partial [n, HEAD_DIM] f32 and sums [n, 2] f32: the scratch, read by
    ``reduce``; items [num_items, ITEM_FIELDS]; extents [num_extents, EXTENT_FIELDS]; tables [any].
    MULTIPLY: the type that tensor cores are given.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    open_next(EARLY)
    # What lies in these comes from the host, before all kernels of a step.
    number = tl.load(items + item * ITEM_FIELDS)
    first, split = tl.load(items + item * ITEM_FIELDS + 1), tl.load(items + item * ITEM_FIELDS + 2)
    extent = extents + tl.maximum(number, 0) * EXTENT_FIELDS
    begin, end, num_blocks, per_split, num_splits = _reach(extent, first, WINDOW, TOKENS, BLOCK_N, LEAST)
    row, num_tokens, start, table = tl.load(extent), tl.load(extent + 1), tl.load(extent + 2), tl.load(extent + 3)
    low = split * per_split
    wait(EARLY)
    # A graph's extents may have become shorter than when its items were made, or empty.
    if (number < 0) | (low >= num_blocks) | (first >= num_tokens):
        return
    stop = tl.minimum(low + per_split, num_blocks)

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    query_head = head * GROUP + m % GROUP
    is_row = (m < TOKENS * GROUP) & (token < num_tokens)
    is_number = is_row[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        queries + (row + token).to(tl.int64)[:, None] * query_stride + (query_head * HEAD_DIM)[:, None] + d[None, :],
        mask=is_number, other=0.0,
    ).to(MULTIPLY)  # fmt: skip
    positions = start + token
    tables += table
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    if PER_TOKEN:
        key_scales += head.to(tl.int64) * scale_stride
        value_scales += head.to(tl.int64) * scale_stride

    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Blocks that every row sees whole come first, and need no mask.
    whole = low
    if WINDOW == 0:
        whole = tl.minimum(tl.maximum((start + first + 1) // BLOCK_N, low), stop)
        for i in range(low, whole):
            high, total, mixed = _seen(
                q, high, total, mixed, keys, values, key_scales, value_scales, tables, positions, i * BLOCK_N, 0, end,
                scale, MULTIPLY, FLOAT8, PER_TOKEN, False, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    for i in range(whole, stop):
        high, total, mixed = _seen(
            q, high, total, mixed, keys, values, key_scales, value_scales, tables, positions, begin + i * BLOCK_N,
            start + first - WINDOW + 1, end, scale, MULTIPLY, FLOAT8, PER_TOKEN, True, WINDOW, SOFTCAP, BLOCK_SIZE,
            HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    num_heads = tl.num_programs(1) * GROUP
    mixed *= value_scale
    if num_splits == 1:
        if SINKS:
            total += tl.exp2(tl.load(sinks + query_head) * _LOG2_E - high)
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        to = ((row + token).to(tl.int64) * num_heads + query_head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + to, mixed.to(out.dtype.element_ty), mask=is_number)
    else:
        most, scratch = tl.load(extent + 4), tl.load(extent + 5)
        place = scratch + (token * num_heads + query_head).to(tl.int64) * most + split
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], mixed, mask=is_number)
        tl.store(sums + place * 2, high, mask=is_row)
        tl.store(sums + place * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=STEP)
def reduce(
    sinks, out, partial, sums, items, extents,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (items, KV heads, a tile's rows / ROWS): the splits of ``attend`` into out, SPLITS of them at once.

    Tiles of one split have their result already; of the others, the item of the first split merges them all.
    """
    item, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    open_next(EARLY)
    number = tl.load(items + item * ITEM_FIELDS)
    first, split = tl.load(items + item * ITEM_FIELDS + 1), tl.load(items + item * ITEM_FIELDS + 2)
    extent = extents + tl.maximum(number, 0) * EXTENT_FIELDS
    _, _, _, _, num_splits = _reach(extent, first, WINDOW, TOKENS, BLOCK_N, LEAST)
    row, num_tokens, most, scratch = tl.load(extent), tl.load(extent + 1), tl.load(extent + 4), tl.load(extent + 5)
    wait(EARLY)
    if (number < 0) | (split > 0) | (num_splits == 1) | (first + part * ROWS // GROUP >= num_tokens):
        return
    m, d = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    query_head = head * GROUP + m % GROUP
    is_row = (m < TOKENS * GROUP) & (token < num_tokens)
    is_number = is_row[:, None] & (d < HEAD_DIM)[None, :]
    num_heads = tl.num_programs(1) * GROUP
    place = scratch + (token * num_heads + query_head).to(tl.int64) * most

    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(0, num_splits, SPLITS):
        at = i + tl.arange(0, SPLITS)
        here = place[None, :] + at[:, None]
        is_split = is_row[None, :] & (at < num_splits)[:, None]
        highs = tl.load(sums + here * 2, mask=is_split, other=-float("inf"))
        totals = tl.load(sums + here * 2 + 1, mask=is_split, other=0.0)
        parts = tl.load(
            partial + here[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=is_split[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(high, tl.max(highs, 0))
        # Of a window's or a draft's rows, some see nothing of a split.
        level = tl.where(higher == -float("inf"), 0.0, higher)
        ours, theirs = tl.exp2(high - level), tl.exp2(highs - level[None, :])
        total = total * ours + tl.sum(totals * theirs, 0)
        mixed = mixed * ours[:, None] + tl.sum(parts * theirs[:, :, None], 0)
        high = higher
    if SINKS:
        total += tl.exp2(tl.load(sinks + query_head) * _LOG2_E - high)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    to = ((row + token).to(tl.int64) * num_heads + query_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=is_number)


@triton.jit
def write(
    new_keys, new_values, keys, values, key_scales, value_scales, slots, row_stride, head_stride, scale_stride,
    num_heads, key_scale, value_scale,
    PLAIN: tl.constexpr, FLOAT8: tl.constexpr, PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a row's keys and values into its slot (below 0: nowhere); unless PLAIN, as codes of int8 or float8:
    multiples of a scale by its own largest number (PER_TOKEN), which is noted, or of key_scale and value_scale.
    """
    open_next(EARLY)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    wait(EARLY)
    if slot < 0:
        return
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    here = (h < num_heads)[:, None] & (d < HEAD_DIM)[None, :]
    source = row.to(tl.int64) * row_stride + h[:, None] * HEAD_DIM + d[None, :]
    target = h.to(tl.int64)[:, None] * head_stride + slot * HEAD_DIM + d[None, :]
    k = tl.load(new_keys + source, mask=here, other=0.0)
    v = tl.load(new_values + source, mask=here, other=0.0)
    if PLAIN:
        tl.store(keys + target, k.to(keys.dtype.element_ty), mask=here)
        tl.store(values + target, v.to(values.dtype.element_ty), mask=here)
    else:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_scales, v_scales = tl.zeros([BLOCK_H], tl.float32) + key_scale, tl.zeros([BLOCK_H], tl.float32) + value_scale
        if PER_TOKEN:
            k_scales, v_scales = scale_of(tl.max(tl.abs(k), 1), FLOAT8), scale_of(tl.max(tl.abs(v), 1), FLOAT8)
            noted = h.to(tl.int64) * scale_stride + slot
            tl.store(key_scales + noted, k_scales, mask=h < num_heads)
            tl.store(value_scales + noted, v_scales, mask=h < num_heads)
        tl.store(keys + target, coded(k, k_scales[:, None], FLOAT8), mask=here)
        tl.store(values + target, coded(v, v_scales[:, None], FLOAT8), mask=here)
