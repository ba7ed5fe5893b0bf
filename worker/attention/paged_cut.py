"""How the attention of a step is cut into items of work, one for each program of a launch: a tile of query rows and a
split of its keys.

Decodes and short drafts are launched apart from chunks of prompts. In a chunk's tile a decode would fill a few of 128
rows, and all of them would be multiplied with its keys: over long contexts that takes longer than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import triton

from worker.attention.base import Extent, Numbers
from worker.triton import attention as kernels

EXTENT_FIELDS = int(kernels.EXTENT_FIELDS.value)
ITEM_FIELDS = int(kernels.ITEM_FIELDS.value)
NO_ITEM = -1
MERGED_ROWS = 16
"""Of a tile, that one program of ``reduce`` takes at most."""
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Tile:
    """How work is cut."""

    rows: int
    """Of queries: heads that share a KV head, times tokens."""
    used: int
    """Of these rows, at most."""
    tokens: int
    keys: int
    """At once."""
    itemsize: int
    """Of a key's numbers; 4 where codes become float32."""

    @property
    def is_small(self) -> bool:
        """Of decodes and short drafts."""
        return self.rows <= 32

    @property
    def waves(self) -> int:
        """Programs that are wanted for each processor: they fit at once, and their loads hide each other's waits."""
        return 4 if self.is_small else 2

    @property
    def least_blocks(self) -> int:
        """Of ``keys``, of a split. What a split of a large tile leaves for ``reduce`` is as much as some blocks."""
        return 1 if self.is_small else 4

    @property
    def num_stages(self) -> int:
        return 3 if self.is_small else 2

    def merged_rows(self, group: int) -> int:
        """That one program of ``reduce`` takes: of decodes and drafts a token's."""
        return min(MERGED_ROWS, int(triton.next_power_of_2(group))) if self.is_small else MERGED_ROWS

    @property
    def shape(self) -> dict[str, int]:
        """As both kernels are told it."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "LEAST": self.least_blocks}

    def num_warps(self, block_d: int) -> int:
        """More where a tile's numbers have no room in the registers of fewer."""
        if self.rows * block_d >= 1 << 14:
            return 8
        return 2 if self.rows == 16 and self.itemsize == 2 and block_d <= 128 else 4

    @classmethod
    def few(cls, group: int, head_dim: int, itemsize: int) -> int:
        """How many tokens of an extent a small tile is for; 0: none."""
        return next((few for few in (32, 16, 8, 4, 2, 1) if cls.of(group, few, head_dim, itemsize).is_small), 0)

    @staticmethod
    def pressure(head_dim: int, itemsize: int) -> int:
        """How many times smaller than the largest a tile of such numbers has to be. Shared memory is what runs out
        first: of the devices served, sm_89 has least of it, 99 KiB a program."""
        return int(triton.cdiv(head_dim, 128) * triton.cdiv(itemsize, 2))

    @classmethod
    def of(cls, group: int, num_tokens: int, head_dim: int, itemsize: int) -> Tile:
        """For extents of up to num_tokens, of numbers of itemsize bytes."""
        pressure = cls.pressure(head_dim, itemsize)
        rows = max(16, triton.next_power_of_2(group))
        # Decoding float8 takes registers.
        largest = (64 if itemsize == 1 else 128) // pressure
        while rows < largest and rows < group * num_tokens:
            rows *= 2
        used = min(rows // group, num_tokens) * group
        return cls(rows, used, rows // group, 64 // pressure, itemsize)


@dataclass(frozen=True, slots=True)
class Share:
    """What one launch has of a step."""

    tile: Tile
    items: Numbers
    """[num_items, ITEM_FIELDS]"""
    is_split: bool
    """Some keys are read by several programs."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A step."""

    extents: list[Extent]
    """In the order that items number them in."""
    splits: Numbers
    """[num_extents]: the most that a tile of each is cut into."""
    shares: list[Share]

    @property
    def num_split_rows(self) -> int:
        """Of the scratch."""
        return _split_rows(self.extents, self.splits)


class Cutter:
    """Cuts the steps of one model for one device."""

    def __init__(
        self,
        group: int,
        num_kv_heads: int,
        head_dim: int,
        itemsize: int,
        window: int,
        num_processors: int,
        max_splits: int,
        is_repeatable: bool,
    ) -> None:
        """``group``: query heads that share a KV head; ``itemsize``: of a key's numbers; ``window``: the widest of all
        layers, 0: some see everything; ``is_repeatable``: a row's sums are the same however its sequence is cut into
        steps."""
        self._shape = group, head_dim, itemsize
        self._num_kv_heads, self._window, self._num_processors = num_kv_heads, window, num_processors
        self._max_splits, self._is_repeatable = max_splits, is_repeatable
        # Where even a decode's tile is large there is nothing to be launched apart.
        self._few = UNLIMITED if is_repeatable else Tile.few(group, head_dim, itemsize) or UNLIMITED
        self.may_split = max_splits > 1

    def tile(self, num_tokens: int) -> Tile:
        """For extents of up to so many."""
        group, head_dim, itemsize = self._shape
        # Of another shape it would be another kernel, which may add up otherwise.
        return Tile.of(group, 1 if self._is_repeatable else num_tokens, head_dim, itemsize)

    def cut(self, extents: Sequence[Extent]) -> Cut:
        """With tiles as its extents want them."""
        kinds = [own for own in self._kinds(extents) if own]
        tiles = [self.tile(max(extent.num_tokens for extent in own)) for own in kinds]
        return self._cut(kinds, tiles, UNLIMITED)

    def recut(self, extents: Sequence[Extent], tiles: Sequence[Tile], max_split_rows: int) -> Cut:
        """With these ``tiles_of`` a step, some of which may have nothing to do, and so many rows of the scratch for
        each."""
        return self._cut(self._kinds(extents)[: len(tiles)], tiles, max_split_rows)

    def tiles_of(self, num_rows: int) -> list[Tile]:
        """That serve any step of so many rows: of decodes and short drafts, and of chunks; or of all, where these are
        not apart."""
        tile = self.tile(num_rows)
        if num_rows <= self._few:
            return [tile]
        group, _, _ = self._shape
        of_decodes = self.tile(1)
        return [replace(of_decodes, used=group * of_decodes.tokens), tile]

    def most_items(self, num_rows: int, num_extents: int) -> list[int]:
        """For each of ``tiles_of``: no cut of so many rows, of so many extents, has more. Those that fill the device,
        and, as each extent's are rounded, one more for each tile."""
        # Of chunks there are fewer, as each has more tokens than a draft.
        most = [num_extents, min(num_extents, num_rows // (self._few + 1))]
        return [
            -(-tile.waves * self._num_processors // self._num_kv_heads) + num_rows // tile.tokens + num
            for tile, num in zip(self.tiles_of(num_rows), most, strict=False)
        ]

    def even_splits(self, tile: Tile, num_tiles: int) -> int:
        """Of each of so many tiles, whatever their keys."""
        filled = tile.waves * self._num_processors / (num_tiles * self._num_kv_heads)
        return max(1, min(self._max_splits, round(filled)))

    def _kinds(self, extents: Sequence[Extent]) -> tuple[list[Extent], list[Extent]]:
        few = [extent for extent in extents if extent.num_tokens <= self._few]
        return few, [extent for extent in extents if extent.num_tokens > self._few]

    def _cut(self, kinds: Sequence[list[Extent]], tiles: Sequence[Tile], max_split_rows: int) -> Cut:
        shares, every, num_before = [], [np.empty(0, dtype=np.int32)], 0
        for own, tile in zip(kinds, tiles, strict=True):
            splits = self._splits(own, tile, max_split_rows)
            items = items_of(own, splits, tile)
            items[:, 0] += num_before
            num_before += len(own)
            shares.append(Share(tile, items, bool(splits.max(initial=1) > 1)))
            every.append(splits)
        return Cut(list(chain.from_iterable(kinds)), np.concatenate(every), shares)

    def _splits(self, extents: Sequence[Extent], tile: Tile, max_split_rows: int) -> Numbers:
        """For each extent, in how many parts a tile's keys are read: so that all programs have about equally much to
        do, and as many as fit at once are enough for all. [num_extents]
        """
        num_tokens = np.array([extent.num_tokens for extent in extents], dtype=np.int64)
        lengths = num_tokens + np.array([extent.start for extent in extents], dtype=np.int64)
        if self._window:
            lengths = np.minimum(lengths, self._window + num_tokens)
        blocks, tiles = -(-lengths // tile.keys), -(-num_tokens // tile.tokens)
        share = int(blocks @ tiles) * self._num_kv_heads / (tile.waves * self._num_processors)
        share = max(share, tile.least_blocks)
        splits = np.clip(np.rint(blocks / share), 1, self._max_splits).astype(np.int32)
        while _split_rows(extents, splits) > max_split_rows:
            splits = np.maximum(splits // 2, 1)
        return splits


def _split_rows(extents: Sequence[Extent], splits: Numbers) -> int:
    return int((splits * (splits > 1)) @ [extent.num_tokens for extent in extents])


def items_of(extents: Sequence[Extent], splits: Numbers, tile: Tile) -> Numbers:
    """[num_items, ITEM_FIELDS] of these: those with most to do first, lest the last processor start on one."""
    counts = np.array([extent.num_tokens for extent in extents], dtype=np.int64)
    starts = np.array([extent.start for extent in extents], dtype=np.int64)
    each = -(-counts // tile.tokens) * splits
    extent = np.repeat(np.arange(len(counts)), each)
    within = np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)
    first = within // splits[extent] * tile.tokens
    work = (starts[extent] + first) / splits[extent]
    items = np.stack((extent, first, within % splits[extent]), 1).astype(np.int32)
    return items[np.argsort(-work, kind="stable")]


def numbers_of(
    extents: Sequence[Extent], splits: Numbers, num_heads: int, num_padded: int = 0, tables_at: int = 0
) -> tuple[Numbers, Numbers]:
    """Of each extent EXTENT_FIELDS numbers, and of empty ones up to num_padded in all; and all block tables, end to
    end. splits: the most that a tile of the extent is cut into; tables_at: where among others these tables begin."""
    num_extents = len(extents)
    fields = np.zeros((max(num_extents, num_padded), EXTENT_FIELDS), dtype=np.int32)
    tables = [extent.block_ids for extent in extents]
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    own = fields[:num_extents]
    for at, extent in enumerate(extents):
        own[at, :3] = extent.row, extent.num_tokens, extent.start
    own[:, 3] = tables_at + lengths.cumsum() - lengths
    own[:, 4] = splits
    scratch = own[:, 1] * splits * num_heads * (splits > 1)
    own[:, 5] = scratch.cumsum() - scratch
    return fields, np.array(list(chain.from_iterable(tables)), dtype=np.int32)
