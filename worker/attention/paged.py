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

from worker.attention.base import Extent, Fixing, Scores, Shape
from worker.attention.dense import Varlen, may_be_dense, varlen
from worker.attention.paged_cut import EXTENT_FIELDS, ITEM_FIELDS, MERGED_ROWS, UNLIMITED, Cutter, Tile, items_of
from worker.attention.paged_plan import FixedMixed, FixedTokens, Launch, Scratch, TritonOutline
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
MIN_SPLIT_ROWS = 2048
"""Of the scratch, for each launch of a captured step with chunks; more where it has more than half as many rows."""


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
        dtype: torch.dtype | None = None,
    ) -> None:
        """num_processors: of the device (0: as it says itself). varlen_attn: computes whole prompts in one launch
        (None: torch's does, on the devices that it is for). tensor_scales: by layer, of keys and of values, for a
        float8 pool without scales of its own. is_repeatable: a row gets the same bits whatever else is in the step, and
        however its sequence is cut into steps. dtype: of the queries (None: the pool's, or two bytes where it has
        codes).
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
        windows = scores.windows
        self.cutter = Cutter(
            self.group,
            self.num_kv_heads,
            self.head_dim,
            _itemsize(cache, dtype),
            0 if 0 in windows else max(windows),
            num_processors or processors_of(cache.keys[0].device),
            max_splits,
            is_repeatable,
        )
        self._min_dense_tokens, self.max_mixed_tokens = min_dense_tokens, min_dense_tokens - 1
        device = cache.keys[0].device
        self.varlen = varlen(device) if varlen_attn is None and device.type == "cuda" else varlen_attn
        self._scratch = self._none = self._fresh(0)

    @staticmethod
    def serves(cache: KVCache, num_heads: int, dtype: torch.dtype | None = None) -> bool:
        """Whether the kernels can read this pool; ``dtype`` as for one."""
        num_kv_heads, _, head_dim = cache.keys[0].shape
        most = num_kv_heads * MAX_GROUP // Tile.pressure(head_dim, _itemsize(cache, dtype))
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
        return TritonOutline(self, self.cutter.cut(paged), dense, together)

    def fixed(self, shape: Shape, slots: Tensor, places: Tensor) -> FixedTokens | FixedMixed:
        """See Fixing. The launches depend on the shape alone. Programs without work leave at once."""
        fields, rest = torch.split(
            places, [EXTENT_FIELDS * shape.num_sequences, len(places) - EXTENT_FIELDS * shape.num_sequences]
        )
        extents = fields.view(-1, EXTENT_FIELDS)
        return (self._fixed_tokens if shape.num_tokens else self._fixed_mixed)(shape, slots, extents, rest)

    def _fixed_tokens(self, shape: Shape, slots: Tensor, extents: Tensor, places: Tensor) -> FixedTokens:
        """Where all sequences may have as many tokens, each is cut the same, whatever its keys."""
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        tile = self.cutter.tile(num_tokens)
        num_tiles = -(-num_rows // num_tokens) * -(-num_tokens // tile.tokens)
        most = self.cutter.even_splits(tile, num_tiles)
        every = [Extent(0, num_tokens, 0, ())] * shape.num_sequences
        items = torch.from_numpy(items_of(every, np.full(len(every), most, dtype=np.int32), tile)).to(slots.device)
        scratch = self.room(num_rows * most if most > 1 else 0)
        return FixedTokens(
            self,
            slots,
            [Launch(tile, items, tile.merged_rows(self.group) if most > 1 else 0)],
            extents,
            places,
            scratch,
            [],
            None,
            most,
        )

    def _fixed_mixed(self, shape: Shape, slots: Tensor, extents: Tensor, places: Tensor) -> FixedMixed:
        """Each step's items are its own, and there is room for the most that there can be."""
        sizes = [ITEM_FIELDS * num for num in self.cutter.most_items(shape.num_rows, shape.num_sequences)]
        *parts, tables = torch.split(places, [*sizes, len(places) - sum(sizes)])
        # Most tiles of decodes have one token: in pieces of rows nearly all of what merges them would have no work.
        merged_rows = MERGED_ROWS if self.cutter.may_split else 0
        launches = [
            Launch(tile, items.view(-1, ITEM_FIELDS), merged_rows)
            for tile, items in zip(self.cutter.tiles_of(shape.num_rows), parts, strict=True)
        ]
        max_split_rows = max(MIN_SPLIT_ROWS, 2 * shape.num_rows) if merged_rows else 0
        scratch = self.room(len(launches) * max_split_rows)
        return FixedMixed(self, slots, launches, extents, tables, scratch, [], None, max_split_rows)

    def num_places(self, shape: Shape, num_blocks: int) -> int:
        """See Fixing."""
        num_items = 0 if shape.num_tokens else sum(self.cutter.most_items(shape.num_rows, shape.num_sequences))
        return shape.num_sequences * EXTENT_FIELDS + num_items * ITEM_FIELDS + num_blocks

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


def _itemsize(cache: KVCache, dtype: torch.dtype | None) -> int:
    """Of a key's numbers, for which tiles must have room: codes become as wide as queries are. Of two bytes they have
    room beside the codes."""
    return max(cache.keys[0].dtype.itemsize, 4 if dtype is torch.float32 else 1)
