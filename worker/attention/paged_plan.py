"""One step of ``worker.attention.paged`` on the device, and what it launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from torch import Tensor

from worker.attention.base import Extent, Numbers
from worker.attention.dense import Dense, Together
from worker.attention.paged_cut import EXTENT_FIELDS, ITEM_FIELDS, NO_ITEM, Cut, Tile, numbers_of
from worker.triton import attention as kernels
from worker.triton.device import float8_as, multiplies
from worker.triton.turned import turn_and_write

if TYPE_CHECKING:
    from worker.attention.paged import TritonAttention


@dataclass(frozen=True, slots=True)
class Scratch:
    """What splits leave for each other."""

    partial: Tensor
    """[n, head_dim] f32"""
    sums: Tensor
    """[n, 2] f32: a row's largest score, base 2, and the sum of its weights."""


@dataclass(frozen=True, slots=True)
class Part:
    """A layer's part of the pool, as kernels write it."""

    keys: Tensor
    """[num_kv_heads, num_slots, head_dim], float8 as bytes; so are values."""
    values: Tensor
    key_scales: Tensor
    """[num_kv_heads, num_slots] f32 where there is one for each token, so are value_scales."""
    value_scales: Tensor
    float8: int
    """See ``worker.triton.float8``."""
    per_token: bool
    key_scale: float
    """Of all, where there is not; so is value_scale."""
    value_scale: float

    @property
    def is_plain(self) -> bool:
        """Numbers are kept as they are."""
        return not self.float8 and not self.per_token

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def block_d(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))


@dataclass(frozen=True, slots=True)
class Launch:
    """A Share of a step on the device."""

    tile: Tile
    items: Tensor
    """[num_items, ITEM_FIELDS] i32"""
    merged_rows: int
    """Of a tile, that one program of ``reduce`` takes; 0: no keys are read by several, so nothing is merged."""


@dataclass(frozen=True, slots=True)
class TritonOutline:
    """See Outline."""

    attention: TritonAttention
    cut: Cut
    dense: list[Extent]
    together: list[Extent]

    @property
    def numbers(self) -> Numbers:
        """See Outline."""
        items = [share.items.ravel() for share in self.cut.shares]
        fields, tables = numbers_of(self.cut.extents, self.cut.splits, self.attention.num_heads)
        of_dense = [np.array(extent.block_ids, dtype=np.int32) for extent in self.dense]
        together = [Together.numbers(self.together)] if self.together else []
        return np.concatenate((*items, fields.ravel(), tables, *of_dense, *together))

    def plan(self, slots: Tensor, numbers: Tensor) -> TritonPlan:
        """See Outline."""
        attention, cut, size = self.attention, self.cut, self.attention.cache.block_size
        sizes = [share.items.size for share in cut.shares]
        sizes += [len(cut.extents) * EXTENT_FIELDS, sum(len(extent.block_ids) for extent in cut.extents)]
        sizes += [len(extent.block_ids) for extent in self.dense]
        sizes.append(len(numbers) - sum(sizes))
        parts = iter(torch.split(numbers, sizes))
        launches = [
            Launch(
                share.tile,
                next(parts).view(-1, ITEM_FIELDS),
                share.tile.merged_rows(attention.group) if share.is_split else 0,
            )
            for share in cut.shares
        ]
        extents, tables, *dense, together = parts
        return TritonPlan(
            attention,
            slots,
            launches,
            extents.view(-1, EXTENT_FIELDS),
            tables,
            attention.room(cut.num_split_rows),
            [Dense.of(extent, block_ids, size) for extent, block_ids in zip(self.dense, dense, strict=True)],
            Together.of(self.together, together) if self.together else None,
        )


@dataclass(slots=True)
class TritonPlan:
    """A step, on the device. What ``attend`` launches depends on the shapes of these tensors, not on what is in them:
    captured once, it can be replayed over other numbers.
    """

    attention: TritonAttention
    slots: Tensor
    """[num_tokens] i64; below 0: the row is padding, its key and value are not kept."""
    launches: list[Launch]
    extents: Tensor
    """[num_extents, EXTENT_FIELDS] i32; one of 0 tokens is padding."""
    tables: Tensor
    """[any] i32: block tables end to end."""
    scratch: Scratch
    """Empty: nothing is split."""
    dense: list[Dense]
    together: Together | None = None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        part = self._part(layer)
        assert queries.stride()[1:] == keys.stride()[1:] == values.stride()[1:] == (part.head_dim, 1)
        assert keys.stride(0) == values.stride(0)
        kernels.write[(len(self.slots),)](
            keys, values, part.keys, part.values, part.key_scales, part.value_scales, self.slots, keys.stride(0),
            part.keys.stride(0), part.key_scales.stride(0), self.attention.num_kv_heads, part.key_scale,
            part.value_scale, PLAIN=part.is_plain, FLOAT8=part.float8, PER_TOKEN=part.per_token,
            HEAD_DIM=part.head_dim, BLOCK_H=triton.next_power_of_2(self.attention.num_kv_heads), BLOCK_D=part.block_d,
            **self.attention.early,
        )  # fmt: skip
        return self._read(part, layer, queries, keys, values)

    def attend_turning(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        is_normed_together: bool,
        eps: float,
    ) -> Tensor:
        """As ``attend``, of heads that are still to be normed, where there are weights, each by itself or all together,
        and turned: qkv [num_tokens, all heads * head_dim], overwritten; cos and sin [num_tokens, rotary_dim].

        One launch does that and writes keys and values where they belong.
        """
        part, attention = self._part(layer), self.attention
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        rotary_dim, block_h = cos.shape[1], triton.next_power_of_2(num_heads)
        keeps = self.together is not None or any(chunk.places is None for chunk in self.dense)
        assert len(qkv) == len(self.slots)
        turn_and_write[(len(qkv), 3)](
            qkv, cos, sin, cos if query_norm is None else query_norm, cos if key_norm is None else key_norm,
            part.keys, part.values, part.key_scales, part.value_scales, self.slots, qkv.stride(0), cos.stride(0),
            part.keys.stride(0), part.key_scales.stride(0), num_heads, num_kv_heads, eps, part.key_scale,
            part.value_scale, NORM=0 if key_norm is None else 2 if is_normed_together else 1,
            KEEP=keeps, PLAIN=part.is_plain, FLOAT8=part.float8,
            PER_TOKEN=part.per_token, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, BLOCK_H=block_h,
            BLOCK_KV=triton.next_power_of_2(num_kv_heads), BLOCK_D=part.block_d,
            BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
            num_warps=min(16, max(4, block_h * part.block_d // 1024)), **attention.early,
        )  # fmt: skip
        heads = qkv.view(len(qkv), -1, head_dim)
        values_at = num_heads + num_kv_heads
        return self._read(part, layer, heads[:, :num_heads], heads[:, num_heads:values_at], heads[:, values_at:])

    def _part(self, layer: int) -> Part:
        attention, cache = self.attention, self.attention.cache
        keys, values = cache.keys[layer], cache.values[layer]
        key_scales, value_scales = cache.key_scales[layer], cache.value_scales[layer]
        float8, _ = float8_as(keys)
        if float8:
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        per_token = key_scales is not None
        if key_scales is None or value_scales is None:
            key_scales = value_scales = self.scratch.sums  # not read
        return Part(keys, values, key_scales, value_scales, float8, per_token, *attention.tensor_scales[layer])

    def _read(self, part: Part, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What ``attend`` gives back, keys and values being in the pool; of ``keys`` only those of whole prompts are
        looked at."""
        attention, cache, head_dim = self.attention, self.attention.cache, part.head_dim
        num_kv_heads = attention.num_kv_heads
        out = queries.new_empty((len(queries), attention.num_heads * head_dim))
        as_loaded = float8_as(cache.keys[layer])[1]
        pool_keys, pool_values = part.keys.view(as_loaded), part.values.view(as_loaded)
        sinks = attention.scores.sinks_of(layer)
        beside = self.scratch.sums if sinks is None else sinks  # not read where there are none
        shape: dict[str, Any] = {
            "WINDOW": attention.window(layer),
            "SINKS": sinks is not None,
            "GROUP": attention.group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": part.block_d,
            **attention.early,
        }
        for launch in self.launches:
            tile = launch.tile
            kernels.attend[(len(launch.items), num_kv_heads)](
                queries, pool_keys, pool_values, part.key_scales, part.value_scales, beside, out, self.scratch.partial,
                self.scratch.sums, launch.items, self.extents, self.tables, queries.stride(0), pool_keys.stride(0),
                part.key_scales.stride(0),
                attention.scores.scale * (1.0 if part.per_token else part.key_scale),
                1.0 if part.per_token else part.value_scale, MULTIPLY=multiplies(queries), FLOAT8=part.float8,
                PER_TOKEN=part.per_token, SOFTCAP=attention.scores.softcap, BLOCK_SIZE=cache.block_size,
                num_stages=tile.num_stages, num_warps=tile.num_warps(part.block_d), **tile.shape, **shape,
            )  # fmt: skip
        for launch in self.launches:
            tile, rows = launch.tile, launch.merged_rows
            if not rows:
                continue
            kernels.reduce[(len(launch.items), num_kv_heads, triton.cdiv(tile.used, rows))](
                beside, out, self.scratch.partial, self.scratch.sums, launch.items, self.extents, ROWS=rows,
                SPLITS=32 // rows, **tile.shape, **shape,
            )  # fmt: skip
        if self.together is not None and attention.varlen is not None:
            prompts, scale = self.together, attention.scores.scale
            out[prompts.rows] = prompts.attend(attention.varlen, queries, keys, values, scale)
        for chunk in self.dense:
            own = cache.keys[layer], cache.values[layer]
            out[chunk.rows] = chunk.attend(queries, keys, values, *own, attention.scores.scale)
        return out


@dataclass(slots=True)
class FixedTokens(TritonPlan):
    """Of decodes, or of drafts of up to so many tokens. See Fixed."""

    most: int = 1
    """Splits of each tile."""

    def numbers(self, extents: Sequence[Extent], tables_at: int = 0) -> Sequence[Numbers]:
        """See Fixed."""
        splits = np.full(len(extents), self.most, dtype=np.int32)
        fields, tables = numbers_of(extents, splits, self.attention.num_heads, len(self.extents), tables_at)
        return fields.ravel(), tables


@dataclass(slots=True)
class FixedMixed(TritonPlan):
    """With chunks of prompts. See Fixed."""

    max_split_rows: int = 0
    """Of the scratch, for each launch."""

    def numbers(self, extents: Sequence[Extent], tables_at: int = 0) -> Sequence[Numbers]:
        """See Fixed."""
        attention = self.attention
        cut = attention.cutter.recut(extents, [launch.tile for launch in self.launches], self.max_split_rows)
        fields, tables = numbers_of(cut.extents, cut.splits, attention.num_heads, len(self.extents), tables_at)
        items = [
            _padded(share.items, len(launch.items)) for share, launch in zip(cut.shares, self.launches, strict=True)
        ]
        return fields.ravel(), *items, tables


def _padded(items: Numbers, num: int) -> Numbers:
    """[num * ITEM_FIELDS], with such as nobody does behind them."""
    every = np.full((num, ITEM_FIELDS), NO_ITEM, dtype=np.int32)
    every[: len(items)] = items
    return every.ravel()
