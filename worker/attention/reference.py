"""Attention in its plainest form: gather, multiply in float32, mask, softmax. Slow, obvious, and the oracle of the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Extent, Scores
from worker.kv_cache import KVCache


class ReferenceAttention:
    """A Backend for any device."""

    def __init__(self, cache: KVCache, scores: Scores) -> None:
        self._cache, self._scores = cache, scores

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> ReferencePlan:
        size = self._cache.block_size
        offsets = torch.arange(size, device=slots.device)
        tables = []
        for extent in extents:
            blocks = torch.tensor(extent.block_ids, device=slots.device)
            tables.append((blocks[:, None] * size + offsets).flatten()[: extent.start + extent.num_tokens])
        return ReferencePlan(self._cache, self._scores, extents, slots, tables)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    cache: KVCache
    scores: Scores
    extents: Sequence[Extent]
    slots: Tensor
    tables: list[Tensor]
    """For each extent, the slots of its positions from 0 on."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        self.cache.write(layer, self.slots, keys, values)
        out = torch.empty_like(queries)
        for extent, table in zip(self.extents, self.tables, strict=True):
            rows = slice(extent.row, extent.row + extent.num_tokens)
            seen = visible(extent.start, extent.num_tokens, self.scores.windows[layer], queries.device)
            out[rows] = attend(
                queries[rows],
                *self.cache.read(layer, table, torch.float32),
                seen,
                self.scores,
                self.scores.sinks_of(layer),
            )
        return out.flatten(1)


def visible(start: int, num_tokens: int, window: int, device: torch.device) -> Tensor:
    """[num_tokens, start + num_tokens] bool: what each of the positions from ``start`` on may see."""
    rows = torch.arange(start, start + num_tokens, device=device)[:, None]
    columns = torch.arange(start + num_tokens, device=device)[None, :]
    return (columns <= rows) & (columns >= first_seen(rows, window))


def first_seen(positions: Tensor, window: int) -> Tensor:
    """The first position that each may see, by ``Scores.windows``."""
    if window < 0:
        return positions // -window * -window
    return positions - window + 1 if window else torch.zeros_like(positions)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """queries [q, num_heads, head_dim], keys and values [num_kv_heads, k, head_dim], seen [q, k], sinks [num_heads] ->
    [q, num_heads, head_dim]; values may be of another width, which is then that of the result.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    grouped = queries.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    weights = grouped @ keys.float().transpose(1, 2)[:, None] * scores.scale
    if scores.softcap:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    weights = weights.masked_fill(~seen, float("-inf"))
    if sinks is None:
        weights = weights.softmax(-1)
    else:
        beside = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*weights.shape[:-1], 1)
        weights = torch.cat((weights, beside), -1).softmax(-1)[..., :-1]
    # What nobody sees may be NaN, which no weight turns into nothing.
    mixed = weights @ values.float().masked_fill(~seen.any(0)[:, None], 0.0)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1).to(queries.dtype)
