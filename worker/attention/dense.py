"""Prompts by torch's own flash kernel (Dao 2023, "FlashAttention-2"): whole ones of a step in one launch, as they come;
long chunks of others one by one, over keys and values copied out of the pool.

The kernel is named, where torch would choose: on Hopper, with CUDA 13, it prefers cuDNN's, whose plans are made for one
length each (aten/src/ATen/native/cudnn/MHA.cpp), in tens of milliseconds, and prompts have all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from worker.attention.base import Extent, Numbers

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The first that can."""


def may_be_dense(keys: Tensor) -> bool:
    """Whether flash takes such keys, [num_kv_heads, num_slots, head_dim]; others write down a number for each pair of a
    chunk's tokens."""
    if not keys.is_cuda:
        return keys.dtype.itemsize > 1
    is_half = keys.dtype in (torch.float16, torch.bfloat16)
    return is_half and keys.shape[2] % 8 == 0 and torch.backends.cuda.is_flash_attention_available()


Varlen = Callable[..., Tensor]
"""torch.nn.attention.varlen.varlen_attn with fewer heads of keys than of queries, or what does the same."""


@cache
def varlen(device: torch.device) -> Varlen | None:
    """Where this torch has one that takes a scale, and fewer heads of keys than of queries. Whether it takes those is
    tried out: torch 2.11 has nothing to ask for it by, and does it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters.keys()
    if not {"scale", "window_size"} <= known:
        return None
    launch = cast(Varlen, partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn)
    return launch if _shares_keys(launch, device) else None


@torch.inference_mode()
def _shares_keys(launch: Varlen, device: torch.device) -> bool:
    """Whether two prompts, whose query heads share keys by twos, have what each has alone."""
    numbers = torch.arange(5.0 * 8 * 64, device=device).sin_().to(torch.bfloat16).view(5, 8, 64)
    heads = torch.split(numbers, [4, 2, 2], 1)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    try:
        together = launch(*heads, bounds, bounds, 3, 3, scale=0.5, window_size=(-1, 0))
    except (RuntimeError, TypeError, ValueError):
        return False
    alone = []
    for own in (slice(0, 2), slice(2, 5)):
        q, k, v = (each[own].transpose(0, 1)[None] for each in heads)
        alone.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True))
    return torch.allclose(together.float(), torch.cat(alone, 2)[0].transpose(0, 1).float(), atol=0.02, rtol=0.02)


@dataclass(frozen=True, slots=True)
class Together:
    """Whole prompts of a step."""

    rows: Tensor | slice
    """Theirs; [num_rows] i64 where others lie between them."""
    bounds: Tensor
    """[num_prompts + 1] i32: where among these each begins, and the last ends."""
    longest: int

    @staticmethod
    def numbers(extents: Sequence[Extent]) -> Numbers:
        """What ``of`` wants on the device."""
        counts = [extent.num_tokens for extent in extents]
        rows = [np.arange(extent.row, extent.row + extent.num_tokens) for extent in extents]
        return np.concatenate(([0], np.cumsum(counts), *rows)).astype(np.int32)

    @classmethod
    def of(cls, extents: Sequence[Extent], numbers: Tensor) -> Together:
        """``extents`` as for ``numbers``, at least one."""
        bounds, rows = numbers[: len(extents) + 1], numbers[len(extents) + 1 :]
        first, last = extents[0], extents[-1]
        end = last.row + last.num_tokens
        is_run = end - first.row == len(rows)  # in order of rows
        longest = max(extent.num_tokens for extent in extents)
        return cls(slice(first.row, end) if is_run else rows.long(), bounds, longest)

    def attend(self, launch: Varlen, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim] of a step:
        of ``rows``, [num_rows, num_heads * head_dim]."""
        of_prompts = (each[self.rows] for each in (queries, keys, values))
        sizes = self.bounds, self.bounds, self.longest, self.longest
        return launch(*of_prompts, *sizes, scale=scale, window_size=(-1, 0)).flatten(1)


@dataclass(frozen=True, slots=True)
class Dense:
    """A chunk of a prompt."""

    rows: slice
    end: int
    """Of its positions."""
    places: Tensor | None
    """[end]: slots; None where the chunk is all there is, and nothing need be copied."""

    @classmethod
    def of(cls, extent: Extent, block_ids: Tensor, block_size: int) -> Dense:
        """``block_ids`` [any] i32: its own, where it has a past."""
        rows, end = slice(extent.row, extent.row + extent.num_tokens), extent.start + extent.num_tokens
        if not extent.start:
            return cls(rows, end, None)
        within = torch.arange(block_size, device=block_ids.device)
        return cls(rows, end, (block_ids.long()[:, None] * block_size + within).flatten()[:end])

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, pool_keys: Tensor, pool_values: Tensor, scale: float
    ) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim] of a step:
        its own rows, [num_tokens, num_heads * head_dim]. New ones are in the pool, [num_kv_heads, num_slots, head_dim].
        """
        if self.places is None:
            k, v = keys[self.rows].transpose(0, 1), values[self.rows].transpose(0, 1)
        else:
            k, v = pool_keys.index_select(1, self.places), pool_values.index_select(1, self.places)
        with sdpa_kernel(_KERNELS):
            mixed = F.scaled_dot_product_attention(
                queries[self.rows].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=causal_lower_right(self.rows.stop - self.rows.start, self.end),
                scale=scale,
                enable_gqa=True,
            )
        return mixed[0].transpose(0, 1).flatten(1)
