"""How much a model's KV pool holds, and how its numbers are kept there."""

from __future__ import annotations

import torch

from policies import settings
from worker.kv_cache import KVShape, KVType, budget_bytes
from worker.models import Architecture, Decoder, Facts, ModelError

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
    is_shared = architecture.latent is not None
    return KVShape(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim, is_shared)


def max_model_tokens_of(engine: settings.Engine, architecture: Architecture | Facts) -> int:
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
    return min(num_blocks, 2 * engine.max_sequences * -(-max_model_tokens // engine.block_size))


def mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):.2f}"
