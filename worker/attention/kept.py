"""For a model that attends by itself, sequence after sequence: the pool keeps its keys and values, and hands them back.

Each layer's are copied out of the pool in every step, so this is for what no backend can compute, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Extent
from worker.attention.grouped import Group, LayerKind, Pools, places_of


class Kept:
    """Not a Backend, as its plan attends to nothing."""

    def __init__(self, kinds: Sequence[LayerKind], groups: Sequence[Group], pools: Pools) -> None:
        self._kinds, self._pools, self._places = kinds, pools, places_of(groups)

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> KeptPlan:
        """As Backend.plan."""
        size, device = self._pools.block_size, slots.device
        offsets = torch.arange(size, device=device)
        tables = []
        for extent in extents:
            blocks = torch.tensor(extent.block_ids, device=device)
            tables.append((blocks[:, None] * size + offsets).flatten()[: extent.start + extent.num_tokens])
        return KeptPlan(self._kinds, self._pools, self._places, extents, slots, tables)


@dataclass(frozen=True, slots=True)
class KeptPlan:
    kinds: Sequence[LayerKind]
    pools: Pools
    places: dict[int, tuple[int, int]]
    extents: Sequence[Extent]
    slots: Tensor
    tables: list[Tensor]
    """For each extent, the slots of its positions from 0 on."""

    def keep(self, number: int, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of the extent of this number: keys [num_kv_heads, num_tokens, key_dim], values [num_kv_heads, num_tokens,
        value_dim] -> the same of all its positions so far.
        """
        group, place = self.places[layer]
        cache, kind, extent, table = (
            self.pools.caches[group],
            self.kinds[layer],
            self.extents[number],
            self.tables[number],
        )
        slots = self.slots[extent.row : extent.row + extent.num_tokens]
        cache.keys[place][:, slots, : kind.key_dim] = keys
        cache.values[place][:, slots, : kind.value_dim] = values
        return cache.keys[place][:, table, : kind.key_dim], cache.values[place][:, table, : kind.value_dim]
