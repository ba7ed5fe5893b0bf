"""An adapter from its files, in PEFT's layout: adapter_config.json and adapter_model.safetensors.

Everything is checked against the decoder that it is to change before anything is kept, so what is wrong with a file is
one sentence and never half an adapter. One of several ranks checks the whole too, and keeps what its own part of the
decoder takes: of a matrix that is cut by rows all of A and those rows of B, of one that is cut by columns those columns
of A and all of B, so that what it adds is summed with the product.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from worker.adapters.adapter import Adapter, Factor, Place
from worker.adapters.config import Scaling, scaling_of
from worker.adapters.errors import AdapterError
from worker.adapters.native import NativeAdditions, packed_adapter
from worker.models import Architecture, Shard
from worker.native import Library

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MODULE = re.compile(r"layers\.(\d+)\.(self_attn|mlp)\.(\w+)")
_NOT_SERVED = {
    "lora_embedding": "an adapted embedding",
    "lora_magnitude_vector": "DoRA",
    "modules_to_save": "a module that is saved whole",
    ".lora_B.bias": "a bias of the addition",
}
"""What parts of tensors' names mean."""


def read_adapter(
    adapter_id: str,
    directory: Path,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_bytes: int,
    digest: str = "",
    kernels: Library | None = None,
) -> Adapter:
    """Raises AdapterError; ``digest``: what the files must be, empty: whatever they are; ``kernels``: what it may be
    packed for.
    """
    raw_config, raw = _read(directory / CONFIG, MAX_CONFIG_BYTES), _read_tensors(directory, max_bytes)
    found = hashlib.sha256(hashlib.sha256(raw_config).digest() + hashlib.sha256(raw).digest()).hexdigest()[:32]
    if digest and digest != found:
        raise AdapterError(f"{directory}: its files have changed since it was loaded first; load it anew")
    scaling = scaling_of(_object(raw_config, directory / CONFIG), directory / CONFIG)
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise AdapterError(f"{directory / TENSORS} is not a whole safetensors file: {reason}") from None
    factors = _factors(tensors, scaling, shard, directory / TENSORS)
    adapter = assembled(adapter_id, found, factors, shard.own, dtype, device, kernels)
    if adapter.num_bytes > max_bytes:
        raise AdapterError(
            f"{directory}: it takes {adapter.num_bytes} bytes, and engine.max_adapter_bytes is {max_bytes}"
        )
    return adapter


@torch.inference_mode()
def assembled(
    adapter_id: str,
    digest: str,
    factors: Mapping[tuple[int, Place], Sequence[Factor]],
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Library | None = None,
) -> Adapter:
    """In the engine's type, on its device, packed where the kernels take it."""
    placed = {
        place: tuple(
            Factor(factor.down.to(device, dtype), factor.up.to(device, dtype), factor.left) for factor in parts
        )
        for place, parts in factors.items()
    }
    every = [factor for parts in placed.values() for factor in parts]
    rank = max((len(factor.down) for factor in every), default=0)
    if not every or kernels is None or not NativeAdditions.serves(kernels, architecture, dtype):
        return Adapter(adapter_id, digest, rank, placed, sum(factor.num_bytes for factor in every))
    packed = packed_adapter(placed, architecture.num_layers)
    return Adapter(adapter_id, digest, rank, {}, packed.num_bytes, packed)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise AdapterError(f"{path} has {path.stat().st_size} bytes; more than {max_bytes} are not read")
        return path.read_bytes()
    except FileNotFoundError:
        raise AdapterError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_tensors(directory: Path, max_bytes: int) -> bytes:
    if not (directory / TENSORS).exists() and (directory / "adapter_model.bin").exists():
        raise AdapterError(f"{directory / 'adapter_model.bin'} is a pickle, which is not opened; save as safetensors")
    return _read(directory / TENSORS, 4 * max_bytes + MAX_CONFIG_BYTES)  # float32 at most, of what is kept in halves


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return value


def _factors(
    tensors: dict[str, Tensor], scaling: Scaling, shard: Shard, path: Path
) -> dict[tuple[int, Place], list[Factor]]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        found = _NAME.fullmatch(name)
        if found is None:
            what = next((what for part, what in _NOT_SERVED.items() if part in name), "no part of a LoRA adapter")
            raise AdapterError(f"{path}: tensor {name} is {what}, which is not served")
        if tensor.dtype not in FLOATS:
            raise AdapterError(f"{path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, not a float")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{path}: tensor {name} has values that are no finite numbers")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise AdapterError(f"{path} holds no tensors")
    wholes, owns = targets_of(shard.whole), targets_of(shard.own)
    factors: dict[tuple[int, Place], list[Factor]] = {}
    for module, pair in pairs.items():
        for side in "AB":
            if side not in pair:
                raise AdapterError(f"{path} has no tensor base_model.model.{module}.lora_{side}.weight")
        layer, name = _target(module, shard.whole, path)
        place, _, num_out, num_in = wholes[name]
        down, up, rank = pair["A"], pair["B"], scaling.rank_of(module)
        for side, tensor, shape in (("A", down, (rank, num_in)), ("B", up, (num_out, rank))):
            if tuple(tensor.shape) != shape:
                raise AdapterError(
                    f"{path}: tensor base_model.model.{module}.lora_{side}.weight is {_dims(tuple(tensor.shape))}, and"
                    f" this base with the rank of {CONFIG} takes {_dims(shape)}; is the adapter for another base?"
                )
        if layer not in shard.layers:
            continue
        _, part = shard.part(f"{name}.weight", (num_out, num_in))
        if part is not None and part.columns is not None:
            down = down[:, part.columns.start : part.columns.stop].contiguous()
        elif part is not None:
            up = part.of(up)
        factor = Factor(down.float(), up.float() * scaling.factor(module), owns[name][1])
        factors.setdefault((layer - shard.layers.start, place), []).append(factor)
    return factors


def _target(module: str, architecture: Architecture, path: Path) -> tuple[int, str]:
    """Layer and module, one of ``targets_of``, of "model.layers.0.self_attn.q_proj". Raises AdapterError."""
    root = next((root for root in architecture.tensor_roots if module.startswith(f"{root}layers.")), None)
    found = _MODULE.fullmatch(module.removeprefix(root)) if root is not None else None
    targets = targets_of(architecture)
    if found is None or f"{found[2]}.{found[3]}" not in targets:
        known = ", ".join(name.partition(".")[2] for name in targets)
        raise AdapterError(
            f"{path}: it changes {module}, which this {architecture.name} does not have or which is not served; served"
            f" are {known}"
        )
    layer = int(found[1])
    if layer >= architecture.num_layers:
        raise AdapterError(
            f"{path}: it changes {module}, and this {architecture.name} has {architecture.num_layers} layers; the"
            " adapter is for another base"
        )
    return layer, f"{found[2]}.{found[3]}"


def targets_of(architecture: Architecture) -> dict[str, tuple[Place, int, int, int]]:
    """Modules of a layer: the product they are part of, its first column that is theirs, outputs and inputs."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    queries, keys = architecture.num_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    ends: dict[str, tuple[Place, int, int, int]] = {
        "self_attn.o_proj": ("output", 0, hidden, queries),
        "mlp.down_proj": ("down", 0, hidden, inner),
    }
    if architecture.fused:
        return {
            "self_attn.qkv_proj": ("qkv", 0, queries + 2 * keys, hidden),
            "mlp.gate_up_proj": ("gate_up", 0, 2 * inner, hidden),
            **ends,
        }
    return {
        "self_attn.q_proj": ("qkv", 0, queries, hidden),
        "self_attn.k_proj": ("qkv", queries, keys, hidden),
        "self_attn.v_proj": ("qkv", queries + keys, keys, hidden),
        "mlp.gate_proj": ("gate_up", 0, inner, hidden),
        "mlp.up_proj": ("gate_up", inner, inner, hidden),
        **ends,
    }


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
