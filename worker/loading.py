"""A model from its files into its device's memory: where, in what type, on which threads, and whether there is room."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from policies import settings
from policies.devices import ALONE, Turn
from worker import placement
from worker.device import refuse_unrepeatable
from worker.devices import device_of
from worker.kv_cache import free_bytes
from worker.means import kernels_of
from worker.models import (
    Architecture,
    Decoder,
    Facts,
    Layout,
    Means,
    ModelError,
    Shard,
    held_bytes,
    load_decoder,
    packs_bfloat16,
    path_of,
    read_architecture,
)
from worker.native import coding_pays
from worker.room import kv_type_of, max_model_tokens_of, mib


def load_model(
    source: str,
    engine: settings.Engine,
    layout: Layout | None = None,
    rank: int = 0,
    turn: Turn | None = ALONE,
) -> Decoder:
    """One rank's part of a model, in its device's memory; see ``Runner.load``. ``turn``: None in a process that has its
    place already. Raises ModelError, one sentence.
    """
    layout = layout or Layout()
    path = path_of(source)
    architecture = read_architecture(path)
    shard = Shard.of(architecture, layout, rank)
    device = device_of(engine, layout, rank)
    refuse_unrepeatable(engine, device)
    if turn is not None:
        take_place(engine, device, turn)
    dtype = dtype_of(engine, device, architecture)
    kv_type_of(engine, dtype, device)  # refused before anything is loaded
    max_model_tokens = max_model_tokens_of(engine, architecture)
    kernels = kernels_of(engine, device)
    codes = kernels is not None and dtype is torch.bfloat16 and coding_pays(kernels)
    means = Means(kernels, engine.quantize_activations, engine.deterministic, codes)
    # On the CPU all ranks take of the same memory; one asks for them all, before the others have begun to load.
    asking = range(layout.num_ranks) if device.type == "cpu" and rank == 0 else (rank,)
    shards = [Shard.of(architecture, layout, other) for other in asking]
    needed = sum(held_bytes(path, each, dtype, device, engine.quantize, means) for each in shards)
    refuse_too_large(source, needed, dtype if engine.quantize == "none" else engine.quantize, device)
    # One rank reads ahead for all, no more than stays in memory beside the model until it is taken.
    beside = int(needed) if device.type == "cpu" else 0
    room_bytes = free_bytes(torch.device("cpu")) - beside if rank == 0 else 0
    return load_decoder(path, architecture, dtype, device, max_model_tokens, means, engine.quantize, shard, room_bytes)


def settle(engine: settings.Engine, facts: Facts, turn: Turn) -> tuple[torch.device, torch.dtype]:
    """Where and in what a model computes that one process loads whole, which takes its place. Raises ModelError, one
    sentence.
    """
    device = device_of(engine, Layout(), 0)
    take_place(engine, device, turn)
    return device, dtype_of(engine, device, facts)


def refuse_files_too_large(path: Path, facts: Facts, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where the device has no room for the safetensors of a directory, once they are ``dtype``."""
    in_files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    stored = cast("torch.dtype", getattr(torch, facts.dtype, dtype))
    refuse_too_large(str(path), in_files * dtype.itemsize / stored.itemsize, dtype, device)


def refuse_too_large(source: str, needed: float, form: torch.dtype | str, device: torch.device) -> None:
    """Raises ModelError where the device has not so many bytes left. ``form``: that weights will be in."""
    free = free_bytes(device)
    if needed > free:
        raise ModelError(
            f"the weights of {source} take {mib(needed)} MiB in {str(form).removeprefix('torch.')},"
            f" but {mib(free)} MiB of memory are free"
        )


def take_place(engine: settings.Engine, device: torch.device, turn: Turn) -> None:
    """From now on this process keeps to its node of the CPU's memory, if it computes there, and torch to so many
    threads as are configured, or as are its part."""
    part = placement.take(turn, binds=device.type == "cpu")
    torch.set_num_threads(engine.num_threads or part.num_threads)


def dtype_of(engine: settings.Engine, device: torch.device, architecture: Architecture | Facts) -> torch.dtype:
    """As configured, or bfloat16 where the device multiplies it natively, else float16 (CUDA, a float16 checkpoint) or
    float32.
    """
    if engine.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[engine.dtype]
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float16 if architecture.dtype == "float16" else torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions and packs_bfloat16() else torch.float32
