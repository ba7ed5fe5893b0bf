"""Attention for CUDA that reads KV blocks in place: the kernels of ``worker.triton.attention``, and what they are told.

A step's extents are cut into items of work, one for each program of a launch: a tile of query rows and a split of its
keys. All of it lies on the device, so that a captured graph can be replayed with other lengths, tables and slots.

The pool keeps its layout, [KV heads, slots, head_dim] a layer: to a program, which reads one head, a block is one
piece of block_size * head_dim numbers either way, and [blocks, KV heads, block_size, head_dim] would only bring the
heads of a block together, which no kernel reads together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import Extent, Fixing, Numbers, Scores
from worker.attention.dense import Varlen, may_be_dense, varlen
from worker.attention.paged_plan import EXTENT_FIELDS, Scratch, Tile, TritonOutline, TritonPlan, numbers_of
from worker.kv_cache import KVCache
from worker.triton.device import num_processors as processors_of
from worker.triton.early import early

MIN_DENSE_TOKENS = 512
"""A chunk of so many tokens goes through torch's flash kernel (``worker.attention.dense``), over keys and values copied
out of the pool: the copy is read once for hundreds of rows. So do prompts that are whole and as long together, which
need no copy. A guess: not measured yet.
"""
MAX_SPLITS = 64
MAX_GROUP = 128
MAX_HEAD_DIM = 256
UNLIMITED = 1 << 30


class TritonAttention(Fixing):
    """A Backend for CUDA devices from sm_80 on; see ``serves`` for which pools."""

    def __init__(
        self,
        cache: KVCache,
        scores: Scores,
        num_heads: int,
        *,
        num_processors: int = 0,
        max_splits: int = MAX_SPLITS,
        min_dense_tokens: int = MIN_DENSE_TOKENS,
        varlen_attn: Varlen | None = None,
        tensor_scales: Sequence[tuple[float, float]] = (),
        is_repeatable: bool = False,
    ) -> None:
        """num_processors: of the device (0: as it says itself). varlen_attn: computes whole prompts in one launch
        (None: torch's does, on the devices that it is for). tensor_scales: by layer, of keys and of values, for a
        float8 pool without scales of its own. is_repeatable: a row gets the same bits whatever else is in the step, and
        however its sequence is cut into steps.
        """
        if is_repeatable:
            max_splits = 1
        if is_repeatable or not may_be_dense(cache.keys[0]):
            min_dense_tokens = UNLIMITED
        self._is_repeatable = is_repeatable
        self.cache, self.scores, self.num_heads = cache, scores, num_heads
        self.num_kv_heads, _, self.head_dim = cache.keys[0].shape
        self.group = num_heads // self.num_kv_heads
        self.tensor_scales = list(tensor_scales) or [(1.0, 1.0)] * len(cache.keys)
        self.early = early(cache.keys[0].device)
        self._num_processors = num_processors or processors_of(cache.keys[0].device)
        self._max_splits, self._min_dense_tokens = max_splits, min_dense_tokens
        device = cache.keys[0].device
        self.varlen = varlen(device) if varlen_attn is None and device.type == "cuda" else varlen_attn
        self._scratch = self._none = self._fresh(0)

    @staticmethod
    def serves(cache: KVCache, num_heads: int) -> bool:
        """Whether the kernels can read this pool."""
        num_kv_heads, _, head_dim = cache.keys[0].shape
        most = num_kv_heads * MAX_GROUP // Tile.pressure(head_dim, cache.keys[0].dtype.itemsize)
        known = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
        if cache.key_scales[0] is not None:
            known.append(torch.int8)
        return cache.keys[0].dtype in known and head_dim <= MAX_HEAD_DIM and num_heads <= most

    def outline(self, extents: Sequence[Extent]) -> TritonOutline:
        """See Outlining."""
        together = self._together(extents)
        others = [extent for extent in extents if extent.start or not together]
        dense = [extent for extent in others if self._is_dense(extent)]
        paged = [extent for extent in others if not self._is_dense(extent)]
        tile = self._tile(max((extent.num_tokens for extent in paged), default=1))
        splits = self._splits(paged, tile)
        items = _items(paged, splits, tile)
        num_rows = int(splits @ [extent.num_tokens for extent in paged]) if splits.max(initial=1) > 1 else 0
        fields, tables = numbers_of(paged, splits, self.num_heads)
        return TritonOutline(self, tile, items, fields, tables, num_rows, dense, together)

    def fixed(self, num_tokens: int, slots: Tensor, places: Tensor) -> TritonPlan:
        """See Fixing. The launches depend on num_tokens and the number of slots alone. Programs without work leave at
        once.
        """
        num_rows = len(slots)
        tile = self._tile(num_tokens)
        tiles = -(-num_rows // num_tokens) * -(-num_tokens // tile.tokens)
        most = max(1, min(self._max_splits, round(tile.waves * self._num_processors / (tiles * self.num_kv_heads))))
        # There may be as many sequences as rows.
        extents = [Extent(0, num_tokens, 0, ())] * num_rows
        items = torch.from_numpy(_items(extents, np.full(num_rows, most, dtype=np.int32), tile)).to(slots.device)
        numbers = places[: num_rows * EXTENT_FIELDS].view(num_rows, EXTENT_FIELDS)
        tables = places[num_rows * EXTENT_FIELDS :]
        scratch = self.room(num_rows * most if most > 1 else 0)
        return TritonPlan(self, tile, slots, items, numbers, tables, scratch, [], most)

    def num_places(self, num_rows: int, num_blocks: int) -> int:
        """See Fixing."""
        return num_rows * EXTENT_FIELDS + num_blocks

    def _tile(self, num_tokens: int) -> Tile:
        # Of another shape it would be another kernel, which may add up otherwise.
        num_tokens = 1 if self._is_repeatable else num_tokens
        return Tile.of(self.group, num_tokens, self.head_dim, self.cache.keys[0].dtype.itemsize)

    def window(self, layer: int) -> int:
        """As the kernels are told it."""
        window = self.scores.windows[layer]
        # Else blocks that a whole tile sees go without a mask, by other instructions than the same blocks with one.
        return UNLIMITED if self._is_repeatable and not window else window

    def _together(self, extents: Sequence[Extent]) -> list[Extent]:
        """The whole prompts among them, in order of rows; none where that does not pay, or not all can."""
        whole = sorted((extent for extent in extents if not extent.start), key=lambda extent: extent.row)
        num_tokens = sum(extent.num_tokens for extent in whole)
        if self.varlen is None or num_tokens < self._min_dense_tokens:
            return []
        return whole if self._is_plain(max(extent.num_tokens for extent in whole)) else []

    def _is_dense(self, extent: Extent) -> bool:
        end = extent.start + extent.num_tokens
        return extent.num_tokens >= self._min_dense_tokens and self._is_plain(end)

    def _is_plain(self, end: int) -> bool:
        """What comes before a position below ``end`` counts by its score alone."""
        scores = self.scores
        return not scores.softcap and not scores.sinks and all(not window or window >= end for window in scores.windows)

    def _splits(self, extents: Sequence[Extent], tile: Tile) -> Numbers:
        """For each extent, in how many parts a tile's keys are read: so that all programs have about equally much to
        do, and as many as fit at once are enough for all. [num_extents]
        """
        window = 0 if 0 in self.scores.windows else max(self.scores.windows)
        num_tokens = np.array([extent.num_tokens for extent in extents], dtype=np.int64)
        lengths = num_tokens + [extent.start for extent in extents]
        if window:
            lengths = np.minimum(lengths, window + num_tokens)
        blocks, tiles = -(-lengths // tile.keys), -(-num_tokens // tile.tokens)
        share = int(blocks @ tiles) * self.num_kv_heads / (tile.waves * self._num_processors)
        share = max(share, tile.least_blocks)
        return np.clip(np.rint(blocks / share), 1, self._max_splits).astype(np.int32)

    def room(self, num_rows: int) -> Scratch:
        """For so many rows of each head. Kept from step to step: kernels of one stream use it one after the other."""
        if len(self._scratch.sums) < num_rows * self.num_heads:
            self._scratch = self._fresh(num_rows)
        return self._scratch if num_rows else self._none

    def _fresh(self, num_rows: int) -> Scratch:
        device, size = self.cache.keys[0].device, num_rows * self.num_heads
        return Scratch(
            torch.empty((size, self.head_dim), device=device),
            torch.empty((size, 2), device=device),
        )


def _items(extents: Sequence[Extent], splits: Numbers, tile: Tile) -> Numbers:
    """[num_items, ITEM_FIELDS]: those with most to do first, lest the last processor start on one."""
    counts = np.array([extent.num_tokens for extent in extents], dtype=np.int64)
    starts = np.array([extent.start for extent in extents], dtype=np.int64)
    each = -(-counts // tile.tokens) * splits
    extent = np.repeat(np.arange(len(counts)), each)
    within = np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)
    first = within // splits[extent] * tile.tokens
    work = (starts[extent] + first) / splits[extent]
    items = np.stack((extent, first, within % splits[extent]), 1).astype(np.int32)
    return items[np.argsort(-work, kind="stable")]
