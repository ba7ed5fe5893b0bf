"""The CPU's attention: a block table read as a few stretches of memory, one flash call for each, joined afterwards.

Blocks that are neighbours in the table and in the pool are one stretch, which torch's flash kernel reads in place. A
token that is decoded needs no mask over its past; a chunk of a prompt needs none over its past either, and over itself
only the square causal one. Softmax over the union is the mean of the parts weighted by exp(log-sum-exp), as in
flash-decoding (Dao et al. 2023) and cascade inference (Ye et al. 2024). What flash cannot do, soft-capped scores, goes
the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Extent, Scores
from worker.attention.reference import attend as attend_plainly
from worker.attention.reference import visible
from worker.kv_cache import KVCache

MAX_RUNS = 4
"""A table in more stretches than this is gathered into one copy: a call costs about as much as copying 1000 slots."""
TILE = 256
"""Query rows that share one mask, or one float32 score matrix, where these are needed."""

Run = tuple[int, int]
"""Slots [first, last)."""

Part = tuple[Tensor, Tensor]
"""Of the keys: outputs [1, heads, rows, head_dim] and log-sum-exps [1, heads, rows] f32."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class SegmentAttention:
    """A Backend for the CPU."""

    def __init__(self, cache: KVCache, scores: Scores) -> None:
        self._cache, self._scores = cache, scores

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> SegmentPlan:
        size = self._cache.block_size
        # What is to be multiplied by scales is copied anyway.
        max_runs = MAX_RUNS if self._cache.key_scales[0] is None else 0
        pieces = {
            window: [_piece(extent, window, size, bool(self._scores.softcap), max_runs) for extent in extents]
            for window in set(self._scores.windows)
        }
        return SegmentPlan(self._cache, self._scores, slots, pieces)


@dataclass(frozen=True, slots=True)
class Decode:
    """One token and all it may see."""

    row: int
    runs: list[Run]
    gather: Tensor | None
    """The slots of the runs where they are too many to be called one by one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens: their past, wholly visible, and themselves, causal."""

    row: int
    num_tokens: int
    runs: list[Run]
    gather: Tensor | None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Several tokens whose view needs a mask: a window that ends among them, or capped scores."""

    row: int
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [first, last) of a piece, the slots that any of them sees, and which of those each sees."""

    first: int
    last: int
    gather: Tensor
    seen: Tensor


Piece = Decode | Chunk | Tiles


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    cache: KVCache
    scores: Scores
    slots: Tensor
    pieces: dict[int, list[Piece]]
    """By window."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        self.cache.write(layer, self.slots, keys, values)
        outs = self.read(layer, queries, keys, values)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def read(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Attention of each piece, [its num_tokens, num_heads * head_dim]; all keys and values are in their slots."""
        outs = []
        for piece in self.pieces[self.scores.windows[layer]]:
            match piece:
                case Decode():
                    outs.append(self._decode(piece, layer, queries))
                case Chunk():
                    outs.append(self._chunk(piece, layer, queries, keys, values))
                case Tiles():
                    outs.append(self._tiles(piece, layer, queries))
        return outs

    def _decode(self, piece: Decode, layer: int, queries: Tensor) -> Tensor:
        """[1, num_heads * head_dim]"""
        num_kv_heads = len(self.cache.keys[layer])
        # The heads that share a KV head become rows of one call, so its keys are read once.
        folded = queries[piece.row].view(1, num_kv_heads, -1, queries.shape[2])
        parts = [
            _flash(folded, k[None], v[None], scale=self.scores.scale)
            for k, v in self._stretches(piece, layer, queries.dtype)
        ]
        return _joined(self._with_sinks(parts, layer, 1)).reshape(1, -1)

    def _with_sinks(self, parts: list[Part], layer: int, num_tokens: int) -> list[Part]:
        """A sink is one more part of the keys, whose values are zero."""
        sinks = self.scores.sinks_of(layer)
        if sinks is None:
            return parts
        out, log_sum = parts[0]
        sinks = sinks.view(-1, 1).expand(-1, num_tokens).reshape(log_sum.shape)
        return [*parts, (torch.zeros_like(out), sinks)]

    def _chunk(self, piece: Chunk, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim]"""
        rows = slice(piece.row, piece.row + piece.num_tokens)
        own = queries[rows].transpose(0, 1)[None]
        parts = []
        if piece.runs:
            # What comes before is seen whole, so the heads that share a KV head may become rows of one call here too:
            # its keys are read once, which takes a third off a short chunk far into a prompt.
            folded = own.reshape(1, keys.shape[1], -1, own.shape[3])
            for k, v in self._stretches(piece, layer, queries.dtype):
                out, log_sum = _flash(folded, k[None], v[None], scale=self.scores.scale)
                parts.append((out.reshape(own.shape), log_sum.reshape(own.shape[:3])))
        if self.cache.keeps(queries.dtype):
            own_keys, own_values = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
        else:  # as whoever comes later will see them
            own_keys, own_values = self.cache.read(layer, self.slots[rows], queries.dtype)
        parts.append(_flash(own, own_keys[None], own_values[None], is_causal=True, scale=self.scores.scale))
        return _joined(self._with_sinks(parts, layer, piece.num_tokens))[0].transpose(0, 1).flatten(1)

    def _stretches(self, piece: Decode | Chunk, layer: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        if piece.gather is not None:
            return [self.cache.read(layer, piece.gather, dtype)]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return [(keys[:, first:last].to(dtype), values[:, first:last].to(dtype)) for first, last in piece.runs]

    def _tiles(self, piece: Tiles, layer: int, queries: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim]"""
        outs = []
        for tile in piece.tiles:
            rows = queries[piece.row + tile.first : piece.row + tile.last]
            k, v = self.cache.read(layer, tile.gather, queries.dtype)
            if self.scores.softcap:
                outs.append(attend_plainly(rows, k, v, tile.seen, self.scores, self.scores.sinks_of(layer)).flatten(1))
            else:
                mask = torch.zeros(tile.seen.shape, dtype=rows.dtype).masked_fill_(~tile.seen, float("-inf"))
                part = _flash(rows.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=self.scores.scale)
                out = _joined(self._with_sinks([part], layer, len(rows)))
                outs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outs)


def _piece(extent: Extent, window: int, block_size: int, is_capped: bool, max_runs: int) -> Piece:
    start, num_tokens = extent.start, extent.num_tokens
    end = start + num_tokens
    if is_capped or (num_tokens > 1 and 0 < window < end):
        return Tiles(extent.row, [_tile(extent, window, block_size, first) for first in range(0, num_tokens, TILE)])
    if num_tokens == 1:
        runs = _runs(extent.block_ids, max(0, end - window) if window else 0, end, block_size)
        return Decode(extent.row, runs, _gather(runs, max_runs))
    runs = _runs(extent.block_ids, 0, start, block_size)
    return Chunk(extent.row, num_tokens, runs, _gather(runs, max_runs))


def _tile(extent: Extent, window: int, block_size: int, first: int) -> Tile:
    last = min(first + TILE, extent.num_tokens)
    begin = max(0, extent.start + first - window + 1) if window else 0
    end = extent.start + last
    slots = torch.cat([torch.arange(*run) for run in _runs(extent.block_ids, begin, end, block_size)])
    seen = visible(extent.start + first, last - first, window, slots.device)[:, begin:]
    return Tile(first, last, slots, seen)


def _runs(block_ids: Sequence[int], begin: int, end: int, block_size: int) -> list[Run]:
    """The slots of the positions [begin, end), in order, as the fewest runs."""
    runs: list[Run] = []
    position, first, last = begin, 0, 0
    while position < end:
        index = position // block_size
        slot = block_ids[index] * block_size + position - index * block_size
        next_position = min(end, (index + 1) * block_size)
        if slot != last or first == last:
            if first != last:
                runs.append((first, last))
            first = slot
        last = slot + next_position - position
        position = next_position
    if first != last:
        runs.append((first, last))
    return runs


def _gather(runs: list[Run], max_runs: int) -> Tensor | None:
    return torch.cat([torch.arange(*run) for run in runs]) if len(runs) > max_runs else None


def _joined(parts: list[Part]) -> Tensor:
    """Over parts of the keys -> over all."""
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([part[1] for part in parts]).softmax(0).unsqueeze(-1)
    total = parts[0][0].float() * weights[0]
    for index in range(1, len(parts)):
        total.addcmul_(parts[index][0].float(), weights[index])
    return total.to(parts[0][0].dtype)
