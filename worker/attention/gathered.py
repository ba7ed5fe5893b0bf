"""Attention for any device: copy what a step sees out of the pool, then torch's scaled-dot-product attention.

All decodes of a step are one padded call, each chunk of a prompt is a call of its own. The copy doubles the memory
traffic; a kernel that reads blocks in place is the next step for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.base import Extent, Scores
from worker.attention.reference import attend as attend_plainly
from worker.attention.reference import first_seen, visible
from worker.kv_cache import KVCache


class GatheredAttention:
    """A Backend for any device."""

    def __init__(self, cache: KVCache, scores: Scores) -> None:
        self._cache, self._scores = cache, scores

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> GatheredPlan:
        decodes = [extent for extent in extents if extent.num_tokens == 1]
        groups = [self._decodes(decodes, slots.device)] if decodes else []
        groups += [self._chunk(extent, slots.device) for extent in extents if extent.num_tokens > 1]
        return GatheredPlan(self._cache, self._scores, slots, groups)

    def _decodes(self, extents: list[Extent], device: torch.device) -> Group:
        size = self._cache.block_size
        width = max(len(extent.block_ids) for extent in extents)
        blocks = torch.tensor([[*extent.block_ids, *(0,) * (width - len(extent.block_ids))] for extent in extents])
        lengths = torch.tensor([extent.start + 1 for extent in extents])
        rows = torch.tensor([extent.row for extent in extents])
        blocks, lengths, rows = blocks.to(device), lengths.to(device), rows.to(device)
        length = max(extent.start for extent in extents) + 1
        slots = (blocks[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        position, last = torch.arange(length, device=device)[None, :], lengths[:, None] - 1
        places, seen = {}, {}
        for window in set(self._scores.windows):
            first = first_seen(last, window)
            places[window] = slots.gather(1, position.clamp(first, last))
            seen[window] = ((position >= first) & (position <= last))[:, None]
        return Group(rows, places, seen)

    def _chunk(self, extent: Extent, device: torch.device) -> Group:
        size, end = self._cache.block_size, extent.start + extent.num_tokens
        blocks = torch.tensor(extent.block_ids).to(device)
        slots = (blocks[:, None] * size + torch.arange(size, device=device)).flatten()
        position, start = torch.arange(end, device=device), torch.tensor(extent.start, device=device)
        places, seen = {}, {}
        for window in set(self._scores.windows):
            places[window] = slots[position.clamp(min=first_seen(start, window))][None]
            seen[window] = visible(extent.start, extent.num_tokens, window, device)[None]
        rows = torch.arange(extent.row, extent.row + extent.num_tokens, device=device)
        return Group(rows, places, seen)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many query rows."""

    rows: Tensor
    """[num_sequences * num_queries]"""
    places: dict[int, Tensor]
    """By window, [num_sequences, num_positions]: slots. What a sequence does not see stands for one that it does: times
    a weight of nought a stranger's NaN would still be NaN."""
    seen: dict[int, Tensor]
    """By window, [num_sequences, num_queries, num_positions] bool."""


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    cache: KVCache
    scores: Scores
    slots: Tensor
    groups: list[Group]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        self.cache.write(layer, self.slots, keys, values)
        num_heads, head_dim = queries.shape[1:]
        out = queries.new_empty((len(queries), num_heads * head_dim))
        for group in self.groups:
            window = self.scores.windows[layer]
            seen = group.seen[window]
            keys, values = self.cache.read(layer, group.places[window], queries.dtype)
            q = queries[group.rows].view(len(seen), -1, num_heads, head_dim)
            if self.scores.softcap or self.scores.sinks:
                k, v, sinks = keys.transpose(0, 1), values.transpose(0, 1), self.scores.sinks_of(layer)
                mixed = torch.stack(
                    [attend_plainly(*one, self.scores, sinks) for one in zip(q, k, v, seen, strict=True)]
                )
            else:
                mixed = _attend(q, keys, values, seen, self.scores.scale)
            out[group.rows] = mixed.reshape(len(group.rows), -1)
        return out


def _attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """queries [num_sequences, num_queries, num_heads, head_dim], keys and values [num_kv_heads, num_sequences,
    num_positions, head_dim], seen [num_sequences, num_queries, num_positions] -> as queries.

    To torch each KV head of each sequence is a text of its own, whose heads have the same keys: for heads that share
    them it has no kernel on CUDA where there is a mask, and would copy them for each.
    """
    num_kv_heads, num_sequences = keys.shape[:2]
    heads = queries.view(*queries.shape[:2], num_kv_heads, -1, queries.shape[3]).permute(2, 0, 3, 1, 4)
    k, v = (each.flatten(0, 1)[:, None].expand(-1, heads.shape[2], -1, -1) for each in (keys, values))
    mask = seen.expand(num_kv_heads, *seen.shape).flatten(0, 1)[:, None]
    mixed = F.scaled_dot_product_attention(heads.flatten(0, 1), k, v, attn_mask=mask, scale=scale)
    return mixed.view(num_kv_heads, num_sequences, *mixed.shape[1:]).permute(1, 3, 0, 2, 4).flatten(2, 3)
