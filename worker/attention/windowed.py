"""KV and attention of a model some of whose layers have windows while others see everything: each kind has a pool.

A block of the pool of those that see everything may have a *companion* in the other one, with the same tokens in it
(``worker.windows`` says when). Attention with windows is given a sequence as if it began with the first block that any
window reaches: its keys have been turned by their positions before, and only how far they lie apart matters. Where a
sum's order depends on positions and must not change, it begins at a multiple of REPEATS_EVERY at most so many before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import Backend, Extent, Plan
from worker.attention.native import NativeAttention
from worker.kv_cache import KVCache, KVShape, KVType
from worker.native import Step

FULL, WINDOWED = 0, 1
REPEATS_EVERY = 2048
"""Positions. Backends that repeat themselves cut keys at multiples of this or of what divides it."""


class TwoPools:
    """What KVCache is where layers do not differ."""

    def __init__(
        self,
        shape: KVShape,
        windows: Sequence[int],
        num_blocks: tuple[int, int],
        block_size: int,
        kv_type: KVType,
        device: torch.device,
        window: int = 0,
    ) -> None:
        """``shape``: of all layers here; ``windows`` of each, as in Scores; ``num_blocks`` of the full pool and of the
        windowed one; ``window``: the largest in any layer of the model, 0: they are all here."""
        self.num_blocks, self.num_windowed_blocks = num_blocks
        self.block_size = block_size
        self.window = window or max(windows)
        self.layers = layers_apart(windows)
        self.places = {layer: (kind, at) for kind in (FULL, WINDOWED) for at, layer in enumerate(self.layers[kind])}
        """A layer: which pool, and its place there."""
        self.companions = torch.full((self.num_blocks,), -1)
        """Of each block; below 0: it has none."""
        self.caches = [
            KVCache(replace(shape, num_layers=len(layers)), num, block_size, kv_type.dtype, device, kv_type.is_scaled)
            for layers, num in zip(self.layers, num_blocks, strict=True)
        ]
        of_layers = [(self.caches[kind], at) for _, (kind, at) in sorted(self.places.items())]
        self.keys = [cache.keys[at] for cache, at in of_layers]
        self.values = [cache.values[at] for cache, at in of_layers]
        self.key_scales = [cache.key_scales[at] for cache, at in of_layers]
        self.value_scales = [cache.value_scales[at] for cache, at in of_layers]

    def keeps(self, dtype: torch.dtype) -> bool:
        """As KVCache."""
        return self.caches[FULL].keeps(dtype)

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers; both have companions."""
        self.caches[FULL].copy_block(source, target)
        self.caches[WINDOWED].copy_block(int(self.companions[source]), int(self.companions[target]))


def layers_apart(windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those that see everything, and those with windows."""
    layers = range(len(windows))
    return [layer for layer in layers if not windows[layer]], [layer for layer in layers if windows[layer]]


class WindowedAttention:
    """A Backend, of one for each pool."""

    def __init__(self, full: Backend, windowed: Backend, cache: TwoPools, is_repeatable: bool = False) -> None:
        """``is_repeatable``: as the backends are."""
        self._full, self._windowed, self._cache = full, windowed, cache
        self._unit = math.lcm(REPEATS_EVERY, cache.block_size) // cache.block_size if is_repeatable else 1
        """Blocks, of a multiple of which a sequence may seem to begin later than it does."""

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> WindowedPlan:
        """See Backend."""
        windowed = self._windowed.plan([self._seen(extent) for extent in extents], self._apart(slots))
        return WindowedPlan((self._full.plan(extents, slots), windowed), self._cache.places)

    def steps(self, extents: Sequence[Extent], slots: array[int]) -> list[Step]:
        """As NativeAttention's; none where the kernels do not serve."""
        full, windowed = self._full, self._windowed
        if not (isinstance(full, NativeAttention) and isinstance(windowed, NativeAttention)):
            return []
        slots_apart = array("q", self._apart(torch.from_numpy(np.array(slots))).tolist())
        seen = [self._seen(extent) for extent in extents]
        return full.steps(extents, slots) + windowed.steps(seen, slots_apart)

    def _apart(self, slots: Tensor) -> Tensor:
        """Of the pool of layers that have windows."""
        size = self._cache.block_size
        return self._cache.companions[slots // size] * size + slots % size

    def _seen(self, extent: Extent) -> Extent:
        """What windows show of it."""
        size, start = self._cache.block_size, extent.start
        first = max(0, start - self._cache.window + 1) // size
        end = -(-(start + extent.num_tokens) // size)
        block_ids = self._cache.companions.numpy()[extent.block_ids[first:end]].tolist()
        assert min(block_ids) >= 0, "a window shows a block that has no companion"
        # What is read in front of the window does not count, but must be numbers, and nobody else's.
        num_before = first % self._unit
        block_ids = [block_ids[0]] * num_before + block_ids
        return Extent(extent.row, extent.num_tokens, start - (first - num_before) * size, block_ids)


@dataclass(frozen=True, slots=True)
class WindowedPlan:
    plans: tuple[Plan, Plan]
    places: dict[int, tuple[int, int]]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        kind, place = self.places[layer]
        return self.plans[kind].attend(place, queries, keys, values)
