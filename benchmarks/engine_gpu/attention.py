"""Our attention alone: decode against the bandwidth, prefill against torch's flash kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine_gpu.device import seconds
from worker.attention import Extent
from worker.runner import Runner
from worker.triton import has_triton


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    kernel: str
    call_s: float
    num_bytes: int
    """Of the keys and values that it had to read."""


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    call_s: float
    kernel_s: float | None
    """By our own kernel; None: it is not for this device."""
    flash_s: float


def decode(runner: Runner, num_sequences: int, num_tokens: int, num_heads: int) -> DecodeAttention:
    """One layer, one new token for each sequence, so many tokens in its past and present."""
    device, cache = torch.device(runner.device), runner.cache
    size, num_kv_heads, head_dim = runner.block_size, cache.keys[0].shape[0], cache.keys[0].shape[-1]
    num_blocks = -(-num_tokens // size)
    assert num_sequences * num_blocks <= runner.num_blocks
    # Blocks of one sequence are far apart, as they are after a while of serving.
    tables = [list(range(each, num_sequences * num_blocks, num_sequences)) for each in range(num_sequences)]
    extents = [Extent(row, 1, num_tokens - 1, table) for row, table in enumerate(tables)]
    place = (num_tokens - 1) % size
    slots = torch.tensor([table[-1] * size + place for table in tables], device=device)
    queries, keys, values = _rows(runner, num_sequences, num_heads)
    with torch.inference_mode():
        plan = runner.attention.plan(extents, slots)
        call_s = seconds(lambda: plan.attend(0, queries, keys, values), device, 20)
    num_bytes = num_sequences * num_tokens * num_kv_heads * head_dim * 2 * keys.element_size()
    return DecodeAttention(type(runner.attention).__name__, call_s, num_bytes)


def prefill(runner: Runner, num_tokens: int, num_heads: int) -> PrefillAttention:
    """One layer, one prompt that nothing of is cached."""
    device, size = torch.device(runner.device), runner.block_size
    table = list(range(-(-num_tokens // size)))
    slots = torch.arange(num_tokens, device=device)
    queries, keys, values = _rows(runner, num_tokens, num_heads)
    with torch.inference_mode():
        extent = Extent(0, num_tokens, 0, table)
        plan = runner.attention.plan([extent], slots)
        call_s = seconds(lambda: plan.attend(0, queries, keys, values), device, 20)
        kernel_s = _kernel_s(runner, extent, slots, (queries, keys, values))
        q, k, v = (tensor.transpose(0, 1)[None].contiguous() for tensor in (queries, keys, values))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            flash_s = seconds(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, 20
            )
    return PrefillAttention(call_s, kernel_s, flash_s)


def _kernel_s(runner: Runner, extent: Extent, slots: Tensor, heads: tuple[Tensor, Tensor, Tensor]) -> float | None:
    if not slots.is_cuda or not has_triton(slots.device):
        return None
    from worker.attention.paged import TritonAttention
    from worker.attention.paged_cut import UNLIMITED

    served = runner.attention
    assert isinstance(served, TritonAttention)
    ours = TritonAttention(served.cache, served.scores, served.num_heads, min_dense_tokens=UNLIMITED)
    plan = ours.plan([extent], slots)
    return seconds(lambda: plan.attend(0, *heads), slots.device, 20)


def _rows(runner: Runner, num_tokens: int, num_heads: int) -> list[Tensor]:
    """Queries, keys and values as a layer makes them: parts of one product."""
    num_kv_heads, _, head_dim = runner.cache.keys[0].shape
    shape = (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    dtype = runner.cache.keys[0].dtype
    heads = torch.randn(shape, dtype=dtype, device=runner.device)
    return list(heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1))
