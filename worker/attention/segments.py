"""The CPU's attention: a block table read as a few stretches of memory, one flash call for each, joined afterwards.

Blocks that are neighbours in the table and in the pool are one stretch, which torch's flash kernel reads in place. A
token that is decoded needs no mask over its past; a chunk of a prompt needs none over its past either, and over itself
only the square causal one. Softmax over the union is the mean of the parts weighted by exp(log-sum-exp), as in
flash-decoding (Dao et al. 2023) and cascade inference (Ye et al. 2024), whose way it is, too, to read a beginning that
several decodes have in common once for all of them. What flash cannot do, soft-capped scores, goes the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention import shared
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
"""Of the keys: outputs [n, heads, rows, head_dim] and log-sum-exps [n, heads, rows] f32."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class SegmentAttention:
    """A Backend for the CPU."""

    def __init__(self, cache: KVCache, scores: Scores) -> None:
        self._cache, self._scores = cache, scores

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> SegmentPlan:
        size = self._cache.block_size
        # What is to be multiplied by scales is copied anyway.
        max_runs = MAX_RUNS if self._cache.key_scales[0] is None else 0
        is_capped = bool(self._scores.softcap)
        # A window sees its own beginning.
        common = [] if is_capped or 0 not in self._scores.windows else _common(extents, size, max_runs)
        begins = {row: beginning.num_tokens for beginning in common for row in beginning.rows}
        pieces = {
            window: [
                _piece(extent, window, size, is_capped, max_runs, 0 if window else begins.get(extent.row, 0))
                for extent in extents
            ]
            for window in set(self._scores.windows)
        }
        return SegmentPlan(self._cache, self._scores, slots, pieces, common)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What several decodes have in common."""

    rows: list[int]
    num_tokens: int
    runs: list[Run]
    gather: Tensor | None
    """As in Decode."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One token and all it may see, but for what it has in common with others."""

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
    common: list[Beginning]
    """Of decodes in layers without a window."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        self.cache.write(layer, self.slots, keys, values)
        outs = self.read(layer, queries, keys, values)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def read(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Attention of each piece, [its num_tokens, num_heads * head_dim]; all keys and values are in their slots."""
        window = self.scores.windows[layer]
        pieces = self.pieces[window]
        together: dict[int, Tensor] = {}
        if self.common and not window:
            decodes = {piece.row: piece for piece in pieces if isinstance(piece, Decode)}
            for beginning in self.common:
                outs = self._together(beginning, [decodes[row] for row in beginning.rows], layer, queries)
                together.update(zip(beginning.rows, torch.split(outs, 1), strict=True))
        return [
            together[piece.row] if piece.row in together else self._alone(piece, layer, queries, keys, values)
            for piece in pieces
        ]

    def _alone(self, piece: Piece, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[its num_tokens, num_heads * head_dim]"""
        match piece:
            case Decode():
                parts = self._with_sinks(self._decode(piece, layer, queries), layer, 1)
                return _joined(parts)[0].reshape(1, -1)
            case Chunk():
                return self._chunk(piece, layer, queries, keys, values)
            case Tiles():
                return self._tiles(piece, layer, queries)

    def _together(self, beginning: Beginning, decodes: list[Decode], layer: int, queries: Tensor) -> Tensor:
        """[n, num_heads * head_dim] of decodes that have a beginning in common."""
        num, num_kv_heads = len(decodes), len(self.cache.keys[layer])
        own = queries[beginning.rows].view(num, num_kv_heads, -1, queries.shape[2])
        folded = own.transpose(0, 1).reshape(1, num_kv_heads, -1, queries.shape[2])
        alike = (num_kv_heads, num, own.shape[2])
        parts = []
        for k, v in self._stretches(beginning, layer, queries.dtype):
            out, log_sum = _flash(folded, k[None], v[None], scale=self.scores.scale)
            parts.append((out.reshape(*alike, -1).transpose(0, 1), log_sum.reshape(alike).transpose(0, 1)))
        rests = [_joined(self._decode(decode, layer, queries)) for decode in decodes]
        rest = torch.cat([out for out, _ in rests]), torch.cat([log_sum for _, log_sum in rests])
        return _joined(self._with_sinks([*parts, rest], layer, 1))[0].reshape(num, -1)

    def _decode(self, piece: Decode, layer: int, queries: Tensor) -> list[Part]:
        """Of what it sees by itself; rows are the heads that share a KV head."""
        num_kv_heads = len(self.cache.keys[layer])
        # They become rows of one call, so its keys are read once.
        folded = queries[piece.row].view(1, num_kv_heads, -1, queries.shape[2])
        return [
            _flash(folded, k[None], v[None], scale=self.scores.scale)
            for k, v in self._stretches(piece, layer, queries.dtype)
        ]

    def _with_sinks(self, parts: list[Part], layer: int, num_tokens: int) -> list[Part]:
        """A sink is one more part of the keys, whose values are zero."""
        sinks = self.scores.sinks_of(layer)
        if sinks is None:
            return parts
        out, log_sum = parts[0]
        sinks = sinks.view(-1, 1).expand(-1, num_tokens).reshape(log_sum.shape[1:]).expand_as(log_sum)
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
        return _joined(self._with_sinks(parts, layer, piece.num_tokens))[0][0].transpose(0, 1).flatten(1)

    def _stretches(
        self, piece: Beginning | Decode | Chunk, layer: int, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
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
                out, _ = _joined(self._with_sinks([part], layer, len(rows)))
                outs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outs)


def _common(extents: Sequence[Extent], block_size: int, max_runs: int) -> list[Beginning]:
    decodes = [extent for extent in extents if extent.num_tokens == 1]
    if len(decodes) < shared.MIN_SHARERS:
        return []
    tables = np.zeros((len(decodes), max(len(decode.block_ids) for decode in decodes)), dtype=np.int32)
    for table, decode in zip(tables, decodes, strict=True):
        table[: len(decode.block_ids)] = decode.block_ids
    lengths = np.array([decode.start + 1 for decode in decodes], dtype=np.int32)
    shares, sharers = shared.beginnings(tables, lengths, block_size)
    common = []
    for first, num, num_tokens in shares.tolist():
        own = [decodes[index] for index in sharers[first : first + num].tolist()]
        runs = _runs(own[0].block_ids, 0, num_tokens, block_size)
        common.append(Beginning([decode.row for decode in own], num_tokens, runs, _gather(runs, max_runs)))
    return common


def _piece(extent: Extent, window: int, block_size: int, is_capped: bool, max_runs: int, begin: int) -> Piece:
    """``begin``: of what a decode sees by itself."""
    start, num_tokens = extent.start, extent.num_tokens
    end = start + num_tokens
    if is_capped or (num_tokens > 1 and 0 < window < end):
        return Tiles(extent.row, [_tile(extent, window, block_size, first) for first in range(0, num_tokens, TILE)])
    if num_tokens == 1:
        runs = _runs(extent.block_ids, max(0, end - window) if window else begin, end, block_size)
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


def _joined(parts: list[Part]) -> Part:
    """Over parts of the keys -> over all."""
    if len(parts) == 1:
        return parts[0]
    log_sums = torch.stack([part[1] for part in parts])
    weights = log_sums.softmax(0).unsqueeze(-1)
    total = parts[0][0].float() * weights[0]
    for index in range(1, len(parts)):
        total.addcmul_(parts[index][0].float(), weights[index])
    return total.to(parts[0][0].dtype), log_sums.logsumexp(0)
