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

from worker.attention.base import (
    Backend,
    Extent,
    Fixed,
    Fixing,
    Numbers,
    Outline,
    Outlining,
    Plan,
    Shape,
    outlined,
    slots_of,
)
from worker.attention.native import NativeAttention
from worker.kv_cache import KVCache, KVShape, KVType
from worker.native import Step

FULL, WINDOWED = 0, 1
SLOT_NUMBERS = 2
"""Of 32 bits, that a slot takes."""
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
        """Of each block, on the host; below 0: it has none."""
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


class WindowedAttention(Outlining):
    """A Backend, of one for each pool."""

    def __init__(self, full: Backend, windowed: Backend, cache: TwoPools, is_repeatable: bool = False) -> None:
        """``is_repeatable``: as the backends are."""
        self._full, self._windowed, self._cache = full, windowed, cache
        self._unit = math.lcm(REPEATS_EVERY, cache.block_size) // cache.block_size if is_repeatable else 1
        """Blocks, of a multiple of which a sequence may seem to begin later than it does."""

    def outline(self, extents: Sequence[Extent]) -> WindowedOutline:
        """See Outlining."""
        seen, slots = self.apart(extents)
        outlines = outlined(self._full, extents), outlined(self._windowed, seen)
        parts = [np.array(slots).view(np.int32), *(outline.numbers for outline in outlines)]
        return WindowedOutline(outlines, parts, self._cache.places)

    def steps(self, extents: Sequence[Extent], slots: array[int]) -> list[Step]:
        """As NativeAttention's; none where the kernels do not serve."""
        full, windowed = self._full, self._windowed
        if not (isinstance(full, NativeAttention) and isinstance(windowed, NativeAttention)):
            return []
        return full.steps(extents, slots) + windowed.steps(*self.apart(extents))

    def apart(self, extents: Sequence[Extent]) -> tuple[list[Extent], array[int]]:
        """What windows show of these, and where in their pool each row's key and value go."""
        seen = [self._seen(extent) for extent in extents]
        return seen, slots_of(seen, self._cache.block_size)

    def _seen(self, extent: Extent) -> Extent:
        size, start = self._cache.block_size, extent.start
        first = max(0, start - self._cache.window + 1) // size
        end = -(-(start + extent.num_tokens) // size)
        block_ids = self._cache.companions.numpy()[extent.block_ids[first:end]].tolist()
        assert min(block_ids) >= 0, "a window shows a block that has no companion"
        # What is read in front of the window does not count, but must be numbers, and nobody else's.
        num_before = first % self._unit
        block_ids = [block_ids[0]] * num_before + block_ids
        return Extent(extent.row, extent.num_tokens, start - (first - num_before) * size, block_ids)


class FixingWindows(WindowedAttention, Fixing):
    """Of backends whose steps can be captured."""

    def __init__(self, full: Fixing, windowed: Fixing, cache: TwoPools, is_repeatable: bool = False) -> None:
        super().__init__(full, windowed, cache, is_repeatable)
        self._fixing = full, windowed
        self.max_mixed_tokens = min(full.max_mixed_tokens, windowed.max_mixed_tokens)

    def fixed(self, shape: Shape, slots: Tensor, places: Tensor) -> FixedWindows:
        """See Fixing. First in places are the slots in the other pool."""
        full, windowed = self._fixing
        num_slots = SLOT_NUMBERS * shape.num_rows
        apart, own = places[:num_slots].view(torch.int64), places[num_slots:]
        # Its tables lie behind the other's, so that nothing is between what a step needs.
        plans = (
            full.fixed(shape, slots, own[windowed.num_places(shape, 0) :]),
            windowed.fixed(shape, apart, own),
        )
        return FixedWindows(plans, self._cache.places, self, shape.num_rows)

    def num_places(self, shape: Shape, num_blocks: int) -> int:
        """See Fixing."""
        # With what seems to be in front of it, a window is never longer than what it is a window on.
        return SLOT_NUMBERS * shape.num_rows + sum(each.num_places(shape, num_blocks) for each in self._fixing)


@dataclass(frozen=True, slots=True)
class WindowedOutline:
    """See Outline."""

    outlines: tuple[Outline, Outline]
    parts: list[Numbers]
    """The slots in the pool of layers with windows, then what each outline wants."""
    places: dict[int, tuple[int, int]]

    @property
    def numbers(self) -> Numbers:
        """See Outline."""
        return np.concatenate(self.parts)

    def plan(self, slots: Tensor, numbers: Tensor) -> WindowedPlan:
        """See Outline."""
        full, windowed = self.outlines
        apart, of_full, of_windowed = torch.split(numbers, [len(part) for part in self.parts])
        plans = full.plan(slots, of_full), windowed.plan(apart.view(torch.int64), of_windowed)
        return WindowedPlan(plans, self.places)


@dataclass(frozen=True, slots=True)
class WindowedPlan:
    plans: tuple[Plan, Plan]
    places: dict[int, tuple[int, int]]

    def of(self, layer: int) -> tuple[Plan, int]:
        """The plan of its pool, and its place there."""
        kind, place = self.places[layer]
        return self.plans[kind], place

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        plan, place = self.of(layer)
        return plan.attend(place, queries, keys, values)


@dataclass(frozen=True, slots=True)
class FixedWindows(WindowedPlan):
    """See Fixed."""

    plans: tuple[Fixed, Fixed]
    attention: FixingWindows
    num_rows: int

    def numbers(self, extents: Sequence[Extent], tables_at: int = 0) -> Sequence[Numbers]:
        """See Fixed."""
        full, windowed = self.plans
        seen, own = self.attention.apart(extents)
        slots = np.full(self.num_rows, -1, dtype=np.int64)
        slots[: len(own)] = own
        of_full = full.numbers(extents, tables_at)
        *fields, tables = windowed.numbers(seen, tables_at + sum(len(part) for part in of_full))
        return slots.view(np.int32), *fields, *of_full, tables
