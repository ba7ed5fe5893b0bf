"""Attention in torch that gives a row the same bits in any company: every product is of one shape.

Sixteen positions that begin at a multiple of sixteen are a tile, whichever of them a step has; keys are taken 256 at a
time from position 0 on, with a running softmax. What a row does not see adds zeros. For devices and types that no
kernel of ours serves, and slower than attention needs to be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Extent, Scores
from worker.kv_cache import KVCache

TILE = 16
KEYS = 256
NOTHING = -1e30
"""The greatest of no scores: finite, so that differences are numbers."""


class RepeatableAttention:
    """A Backend for any device."""

    def __init__(self, cache: KVCache, scores: Scores) -> None:
        self._cache, self._scores = cache, scores

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> RepeatablePlan:
        size, device = self._cache.block_size, slots.device
        offsets = torch.arange(size, device=device)
        tables = []
        for extent in extents:
            end = extent.start + extent.num_tokens
            blocks = torch.tensor(extent.block_ids, device=device)
            table = torch.zeros(-(-end // KEYS) * KEYS, dtype=torch.int64, device=device)
            table[:end] = (blocks[:, None] * size + offsets).flatten()[:end]
            tables.append(table)
        return RepeatablePlan(self._cache, self._scores, extents, slots, tables)


@dataclass(frozen=True, slots=True)
class RepeatablePlan:
    cache: KVCache
    scores: Scores
    extents: Sequence[Extent]
    slots: Tensor
    tables: list[Tensor]
    """For each extent, the slots of its positions from 0 on, and then any slot, to whole ``KEYS``."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        self.cache.write(layer, self.slots, keys, values)
        out = torch.empty_like(queries)
        window = self.scores.windows[layer]
        for extent, table in zip(self.extents, self.tables, strict=True):
            end = extent.start + extent.num_tokens
            first = max(0, extent.start // TILE * TILE - window + 1) // KEYS if window else 0
            seen = range(max(0, extent.start - window + 1) if window else 0, end)
            past = [self._past(layer, table, block, seen) for block in range(first, len(table) // KEYS)]
            for begin in range(extent.start // TILE * TILE, end, TILE):
                start, stop = max(begin, extent.start), min(begin + TILE, end)
                rows = slice(extent.row + start - extent.start, extent.row + stop - extent.start)
                tile = queries.new_zeros((TILE, *queries.shape[1:]), dtype=torch.float32)
                tile[start - begin : stop - begin] = queries[rows]
                mixed = self._attend(tile, begin, layer, first, past)
                out[rows] = mixed[start - begin : stop - begin].to(out.dtype)
        return out.flatten(1)

    def _past(self, layer: int, table: Tensor, block: int, seen: range) -> tuple[Tensor, Tensor]:
        """Keys and values of one block, [num_kv_heads, KEYS, head_dim] f32; zeros where nobody sees them, for they may
        be a stranger's."""
        slots = table[block * KEYS : (block + 1) * KEYS]
        at = torch.arange(block * KEYS, (block + 1) * KEYS, device=table.device)
        hidden = ((at < seen.start) | (at >= seen.stop))[:, None]
        keys, values = self.cache.read(layer, slots, torch.float32)
        return keys.masked_fill_(hidden, 0.0), values.masked_fill_(hidden, 0.0)

    def _attend(self, tile: Tensor, begin: int, layer: int, first: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """tile [TILE, num_heads, head_dim] of the positions from ``begin`` on -> the same shape. ``past``: the blocks
        from ``first`` on."""
        num_kv_heads, _, head_dim = past[0][0].shape
        window, sinks = self.scores.windows[layer], self.scores.sinks_of(layer)
        queries = tile.view(TILE, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        positions = torch.arange(begin, begin + TILE, device=tile.device).repeat(queries.shape[1] // TILE)[:, None]
        greatest = queries.new_full((*queries.shape[:2], 1), NOTHING)
        total = torch.zeros_like(greatest)
        mixed = torch.zeros_like(queries)
        from_block = max(0, begin - window + 1) // KEYS if window else 0
        for block in range(from_block, begin // KEYS + 1):
            keys, values = past[block - first]
            scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(self.scores.scale)
            if self.scores.softcap:
                scores = self.scores.softcap * torch.tanh(scores / self.scores.softcap)
            at = torch.arange(block * KEYS, (block + 1) * KEYS, device=tile.device)[None, :]
            hidden = at > positions
            if window:
                hidden = hidden | (at <= positions - window)
            scores = scores.masked_fill_(hidden, -torch.inf)
            top = torch.maximum(greatest, scores.amax(-1, keepdim=True))
            fading = (greatest - top).exp_()
            weights = (scores - top).exp_()
            total = total * fading + weights.sum(-1, keepdim=True)
            mixed = mixed * fading + torch.bmm(weights, values)
            greatest = top
        if sinks is not None:
            total += (sinks.view(num_kv_heads, -1, 1).repeat_interleave(TILE, 1) - greatest).exp_()
        mixed = mixed / total
        return mixed.view(num_kv_heads, -1, TILE, head_dim).permute(2, 0, 1, 3).reshape(tile.shape)
