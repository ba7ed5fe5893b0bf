"""One step of ``worker.attention.paged`` on the device, and what it launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from worker.attention.base import Extent
from worker.triton import attention as kernels
from worker.triton.device import float8_as, multiplies
from worker.triton.turned import turn_and_write

if TYPE_CHECKING:
    from worker.attention.paged import TritonAttention

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tile:
    """How work is cut."""

    rows: int
    """Of queries: heads that share a KV head, times tokens."""
    tokens: int
    keys: int
    """At once."""

    @classmethod
    def of(cls, group: int, num_tokens: int, head_dim: int, itemsize: int) -> Tile:
        """For extents of up to num_tokens, of numbers of itemsize bytes."""
        # Shared memory is what runs out first: of the devices served, sm_89 has least of it, 99 KiB a program.
        pressure = triton.cdiv(head_dim, 128) * triton.cdiv(itemsize, 2)
        rows = max(16, triton.next_power_of_2(group))
        # Decoding float8 takes registers.
        largest = (64 if itemsize == 1 else 128) // pressure
        while rows < largest and rows < group * num_tokens:
            rows *= 2
        return cls(rows, rows // group, 64 // pressure)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What splits leave for each other."""

    partial: Tensor
    """[n, head_dim] f32"""
    sums: Tensor
    """[n, 2] f32: a row's largest score, base 2, and the sum of its weights."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A chunk of a prompt for torch."""

    rows: slice
    end: int
    """Of its positions."""
    places: Tensor | None
    """[end]: slots; None where the chunk is all there is, and nothing need be copied."""


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


def sent(numbers: Numbers, device: torch.device) -> Tensor:
    """On their way to the device, in its order."""
    on_host = torch.from_numpy(numbers)
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # else the upload would wait for the step that is under way
    return on_host.to(device, non_blocking=True)


@dataclass(slots=True)
class TritonPlan:
    """A step, on the device. What ``attend`` launches depends on the shapes of these tensors, not on what is in them:
    captured once, it can be replayed after ``refill``, or after a kernel has moved the lengths on.
    """

    attention: TritonAttention
    tile: Tile
    slots: Tensor
    """[num_tokens] i64; below 0: the row is padding, its key and value are not kept."""
    items: Tensor
    """[num_items, ITEM_FIELDS] i32"""
    extents: Tensor
    """[num_extents, EXTENT_FIELDS] i32; one of 0 tokens is padding."""
    tables: Tensor
    """[any, width] i32: block tables, found by a field of the extent, so that rows may outlive a step."""
    scratch: Scratch
    """Empty: nothing is split."""
    dense: list[Dense]

    def refill(self, extents: Sequence[Extent], slots: Tensor) -> None:
        """Another step into a plan made by ``fixed``: no more extents, tokens each or blocks than it was made for.

        slots [n] i64, on the device. One upload.
        """
        num_extents, width = len(self.extents), self.tables.shape[1]
        each = len(self.slots) // num_extents
        assert len(extents) <= num_extents
        assert len(slots) <= len(self.slots)
        numbers = np.zeros((num_extents, 4), dtype=np.int32)
        longest = max((len(extent.block_ids) for extent in extents), default=0)
        tables = np.zeros((len(extents), longest), dtype=np.int32)
        assert longest <= width
        for at, extent in enumerate(extents):
            assert extent.num_tokens <= each
            numbers[at] = extent.row, extent.num_tokens, extent.start, at
            tables[at, : len(extent.block_ids)] = extent.block_ids
        packed = sent(np.concatenate((numbers.ravel(), tables.ravel())), self.slots.device)
        self.extents[:, :4].copy_(packed[: numbers.size].view(numbers.shape))
        self.tables[: len(extents), :longest].copy_(packed[numbers.size :].view(tables.shape))
        self.slots[: len(slots)].copy_(slots)
        self.slots[len(slots) :].fill_(-1)

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
        assert len(qkv) == len(self.slots)
        turn_and_write[(len(qkv), 3)](
            qkv, cos, sin, cos if query_norm is None else query_norm, cos if key_norm is None else key_norm,
            part.keys, part.values, part.key_scales, part.value_scales, self.slots, qkv.stride(0), cos.stride(0),
            part.keys.stride(0), part.key_scales.stride(0), num_heads, num_kv_heads, eps, part.key_scale,
            part.value_scale, NORM=0 if key_norm is None else 2 if is_normed_together else 1,
            KEEP=any(chunk.places is None for chunk in self.dense), PLAIN=part.is_plain, FLOAT8=part.float8,
            PER_TOKEN=part.per_token, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, BLOCK_H=block_h,
            BLOCK_KV=triton.next_power_of_2(num_kv_heads), BLOCK_D=part.block_d,
            BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
            num_warps=min(16, max(4, block_h * part.block_d // 1024)),
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
        num_kv_heads, tile = attention.num_kv_heads, self.tile
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
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "BLOCK_D": part.block_d,
            "num_warps": 8 if tile.rows == 128 else 4,
        }
        if len(self.items):
            kernels.attend[(len(self.items), num_kv_heads)](
                queries, pool_keys, pool_values, part.key_scales, part.value_scales, beside, out, self.scratch.partial,
                self.scratch.sums, self.items, self.extents, self.tables, self.tables.stride(0), queries.stride(0),
                pool_keys.stride(0), part.key_scales.stride(0),
                attention.scores.scale * (1.0 if part.per_token else part.key_scale),
                1.0 if part.per_token else part.value_scale, MULTIPLY=multiplies(queries), FLOAT8=part.float8,
                PER_TOKEN=part.per_token, SOFTCAP=attention.scores.softcap, BLOCK_SIZE=cache.block_size,
                num_stages=3 if tile.rows <= 32 else 2, **shape,
            )  # fmt: skip
        if len(self.scratch.sums):
            kernels.reduce[(len(self.items), num_kv_heads, tile.rows // 16)](
                beside, out, self.scratch.partial, self.scratch.sums, self.items, self.extents, ROWS=16, **shape
            )
        for chunk in self.dense:
            out[chunk.rows] = self._densely(chunk, layer, queries, keys, values)
        return out

    def _densely(self, chunk: Dense, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache, rows = self.attention.cache, chunk.rows
        if chunk.places is None:
            k, v = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
        else:
            k, v = cache.keys[layer][:, chunk.places], cache.values[layer][:, chunk.places]
        mixed = F.scaled_dot_product_attention(
            queries[rows].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=causal_lower_right(rows.stop - rows.start, chunk.end),
            scale=self.attention.scores.scale,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1).flatten(1)
