"""Pools of random keys and values, and sequences that lie in them anyhow."""

from __future__ import annotations

import random

import torch

from worker.attention.base import Extent
from worker.kv_cache import KVCache, KVShape

CPU = torch.device("cpu")


def filled(
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    scaled: bool = False,
) -> KVCache:
    cache = KVCache(KVShape(2, num_kv_heads, head_dim), num_blocks, block_size, dtype, device, scaled)
    slots = torch.arange(num_blocks * block_size, device=device)
    for layer in (0, 1):
        keys, values = (torch.randn(num_kv_heads, len(slots), head_dim).transpose(0, 1).to(device) for _ in range(2))
        cache.write(layer, slots, keys, values)
    return cache


def held(cache: KVCache) -> list[torch.Tensor]:
    """All that lies in the pool."""
    scales = [scale for scale in (*cache.key_scales, *cache.value_scales) if scale is not None]
    return [*cache.keys, *cache.values, *scales]


def extents_of(
    sequences: list[tuple[int, int, bool]], block_size: int, chance: random.Random, num_blocks: int = 0
) -> tuple[list[Extent], int]:
    """(start, num_tokens, neighbouring blocks?) each; returns the extents and how many blocks they lie in."""
    num_blocks = num_blocks or sum(-(-(start + num_tokens) // block_size) + 1 for start, num_tokens, _ in sequences)
    free = list(range(num_blocks))
    extents, row = [], 0
    for start, num_tokens, is_neat in sequences:
        count = -(-(start + num_tokens) // block_size)
        blocks = free[:count] if is_neat else chance.sample(free, count)
        free = [block for block in free if block not in blocks]
        extents.append(Extent(row, num_tokens, start, blocks))
        row += num_tokens
    return extents, num_blocks


def slots_of(extents: list[Extent], block_size: int) -> torch.Tensor:
    return torch.tensor(
        [
            extent.block_ids[position // block_size] * block_size + position % block_size
            for extent in extents
            for position in range(extent.start, extent.start + extent.num_tokens)
        ],
        dtype=torch.int64,
    )
