"""Attention of a model whose layers differ: each group of alike layers has a pool and a backend of its own.

Keys, values and queries are brought to one width, the group's, by zeros behind them: these add nothing to a score, and
the backends and kernels, which know one head_dim, serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Backend, Extent, Plan, Scores
from worker.kv_cache import KVCache, KVShape

HEAD_STEP = 16
"""Heads are as wide as a multiple of this, which the compiled kernels ask for."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerKind:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    """As in Scores."""
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """Of the pool."""
        return -(-max(self.key_dim, self.value_dim) // HEAD_STEP) * HEAD_STEP


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that one backend computes."""

    layers: tuple[int, ...]
    num_heads: int
    shape: KVShape
    scores: Scores


def groups_of(kinds: Sequence[LayerKind]) -> list[Group]:
    """In the order of their first layers."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, kind in enumerate(kinds):
        is_chunked, has_sinks = kind.window < 0, kind.sinks is not None
        key = (kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.scale, kind.softcap, is_chunked, has_sinks)
        alike.setdefault(key, []).append(layer)
    return [_group([kinds[layer] for layer in layers], tuple(layers)) for layers in alike.values()]


def _group(kinds: list[LayerKind], layers: tuple[int, ...]) -> Group:
    first = kinds[0]
    sinks = tuple(kind.sinks for kind in kinds if kind.sinks is not None)
    return Group(
        layers=layers,
        num_heads=first.num_heads,
        shape=KVShape(len(layers), first.num_kv_heads, first.head_dim),
        scores=Scores(first.scale, tuple(kind.window for kind in kinds), first.softcap, sinks),
    )


def places_of(groups: Sequence[Group]) -> dict[int, tuple[int, int]]:
    """A layer: its group, and its place there."""
    return {layer: (number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)}


class Pools:
    """The KV of all groups, block for block: what KVCache is where layers do not differ."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caches = [KVCache(group.shape, num_blocks, block_size, dtype, device) for group in groups]

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers."""
        for cache in self.caches:
            cache.copy_block(source, target)


class GroupedAttention:
    """A Backend; ``backend_of`` makes that of one group."""

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        groups: Sequence[Group],
        pools: Pools,
        backend_of: Callable[[Group, KVCache], Backend],
    ) -> None:
        self._backends = [backend_of(group, cache) for group, cache in zip(groups, pools.caches, strict=True)]
        self._kinds = kinds
        self._places = places_of(groups)

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> GroupedPlan:
        """See Backend."""
        plans: list[Plan] = [backend.plan(extents, slots) for backend in self._backends]
        return GroupedPlan(self._kinds, self._places, plans)


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    kinds: Sequence[LayerKind]
    places: dict[int, tuple[int, int]]
    """A layer: its group, and its place there."""
    plans: list[Plan]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As Plan, values being as wide as they are: [num_tokens, num_heads * value_dim]."""
        kind = self.kinds[layer]
        group, place = self.places[layer]
        keys_at, values_at = kind.num_heads, kind.num_heads + kind.num_kv_heads
        num_tokens, num_rows = len(queries), values_at + kind.num_kv_heads
        # One piece of memory for the three: the compiled kernels take them so.
        heads = queries.new_zeros((num_tokens, num_rows, kind.head_dim))
        heads[:, :keys_at, : kind.key_dim] = queries
        heads[:, keys_at:values_at, : kind.key_dim] = keys
        heads[:, values_at:, : kind.value_dim] = values
        out = self.plans[group].attend(place, heads[:, :keys_at], heads[:, keys_at:values_at], heads[:, values_at:])
        if kind.value_dim == kind.head_dim:
            return out
        return out.view(num_tokens, kind.num_heads, kind.head_dim)[..., : kind.value_dim].flatten(1)
