"""How much a model's KV pool holds, and how its numbers are kept there."""

from __future__ import annotations

from dataclasses import replace

import torch

from policies import settings
from policies.batching import limits_of
from policies.batching.room import MAX_PARKED
from worker.attention.windowed import TwoPools, layers_apart
from worker.kv_cache import KVCache, KVShape, KVType, budget_bytes
from worker.models import Architecture, Decoder, Facts, ModelError, Shard
from worker.windows import num_blocks_for

MIN_MODEL_TOKENS = 1024
"""A pool that cannot hold one sequence of so many tokens (or of the model's own context, if shorter) is not worth
serving from.
"""


def kv_type_of(engine: settings.Engine, dtype: torch.dtype, device: torch.device) -> KVType:
    """As configured, for a model that computes in ``dtype``. Raises ModelError where there is no such thing."""
    match engine.kv_dtype, device.type:
        case "int8", _:
            return KVType(torch.int8, is_scaled=True)
        case "fp8", "cuda":
            return KVType(torch.float8_e4m3fn, is_scaled=True)
        case "fp8", _:
            raise ModelError("engine.kv_dtype is fp8, which is for CUDA devices; the CPU keeps KV in int8")
        case "bf16", "cuda" if dtype is not torch.bfloat16:
            raise ModelError(
                f"engine.kv_dtype is bf16, but the model computes in {str(dtype).removeprefix('torch.')}, which on CUDA"
                " devices its KV does as well"
            )
        case "bf16", _:
            return KVType(torch.bfloat16)
        case _:
            return KVType(dtype)


def kv_shape_of(architecture: Architecture) -> KVShape:
    """Of one token in all layers; of DeepSeek's latent attention, keys and values are one vector."""
    is_shared = architecture.latent is not None
    return KVShape(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim, is_shared)


def max_model_tokens_of(engine: settings.Engine, architecture: Architecture | Facts) -> int:
    """Prompt and completion together: as configured, or all positions that the model has. Raises ModelError."""
    if engine.max_model_tokens > architecture.max_positions:
        raise ModelError(
            f"engine.max_model_tokens is {engine.max_model_tokens},"
            f" but this {architecture.name} reaches {architecture.max_positions}"
        )
    return engine.max_model_tokens or architecture.max_positions


def room(model: Decoder, engine: settings.Engine) -> int:
    """As num_blocks_of. Raises ModelError."""
    kv_type = kv_type_of(engine, model.dtype, model.device)
    size = kv_shape_of(model.architecture).block_bytes(engine.block_size, kv_type.dtype, kv_type.is_scaled)
    max_model_tokens = max_model_tokens_of(engine, model.architecture)
    return num_blocks_of(engine, size, max_model_tokens, model.device, model.shard.layout.num_ranks)


def kv_of(
    model: Decoder,
    engine: settings.Engine,
    num_blocks: int | None = None,
    num_windowed_blocks: int = 0,
    may_part: bool = False,
) -> KVCache | TwoPools:
    """Empty; ``num_blocks`` None: as many as free memory allows, and in two pools where these ``may_part`` and it pays.
    Raises ModelError.
    """
    if num_blocks is None:
        num_blocks, apart = room(model, engine), rooms_apart(model, engine) if may_part else (0, 0)
        num_blocks, num_windowed_blocks = larger(num_blocks, apart)
    shape, size, device = kv_shape_of(model.architecture), engine.block_size, model.device
    kv_type = kv_type_of(engine, model.dtype, device)
    if num_windowed_blocks:
        windows, nums = model.architecture.windows, (num_blocks, num_windowed_blocks)
        return TwoPools(shape, windows, nums, size, kv_type, device, max(model.windows))
    return KVCache(shape, num_blocks, size, kv_type.dtype, device, kv_type.is_scaled)


def larger(num_blocks: int, apart: tuple[int, int]) -> tuple[int, int]:
    """The blocks of one pool for all layers, and 0; or as ``rooms_apart``, where these leave the layers that see
    everything more blocks."""
    return apart if apart[0] > num_blocks else (num_blocks, 0)


def rooms_apart(model: Decoder, engine: settings.Engine) -> tuple[int, int]:
    """As num_blocks_of, of two pools: for the layers that see everything, and for those that have windows; 0: there are
    none such on this rank or on another. Raises ModelError.
    """
    windows, shard = model.windows, model.shard
    layout = shard.layout
    stages = [Shard.of(shard.whole, layout, rank).own.windows for rank in range(0, layout.num_ranks, layout.tensor)]
    is_mixed = all(min(own) == 0 < max(own) for own in stages)
    # A window within a block may show nothing but the block that is being filled,
    # of which not every slot holds numbers.
    if not is_mixed or max(windows) < engine.block_size:
        return 0, 0
    num_sequences = MAX_PARKED * limits_of(engine).max_sequences
    num_windowed = num_blocks_for(num_sequences, max(windows), engine.max_step_tokens, engine.block_size)
    kv_type, shape = kv_type_of(engine, model.dtype, model.device), kv_shape_of(model.architecture)
    full, windowed = (
        replace(shape, num_layers=len(layers)).block_bytes(engine.block_size, kv_type.dtype, kv_type.is_scaled)
        for layers in layers_apart(model.architecture.windows)
    )
    num_full = (budget_bytes(engine, model.device, layout.num_ranks) - num_windowed * windowed) // full
    return min(num_full, _most(engine, max_model_tokens_of(engine, model.architecture))), num_windowed


def num_blocks_of(
    engine: settings.Engine, size: int, max_model_tokens: int, device: torch.device, num_ranks: int = 1
) -> int:
    """The blocks of so many bytes that the budget holds, but no more than the largest batch needs, twice: the other
    half is room for the prefix cache. Raises ModelError where they are too few.
    """
    budget = budget_bytes(engine, device, num_ranks)
    num_blocks = budget // size
    least = -(-min(MIN_MODEL_TOKENS, max_model_tokens) // engine.block_size)
    if num_blocks < least:
        raise ModelError(
            f"KV for {least * engine.block_size} tokens takes {mib(least * size)} MiB, but engine.kv_memory_share and"
            f" engine.max_kv_bytes leave {mib(budget)} MiB of free memory"
        )
    return min(num_blocks, _most(engine, max_model_tokens))


def _most(engine: settings.Engine, max_model_tokens: int) -> int:
    """Of blocks that are of use."""
    return 2 * engine.max_sequences * -(-max_model_tokens // engine.block_size)


def mib(num_bytes: float) -> str:
    """For messages: bytes as MiB, to a hundredth."""
    return f"{num_bytes / (1 << 20):.2f}"
