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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from sources import content
from worker.adapters.adapter import Adapter, Factor, HeadFactor, Place
from worker.adapters.config import Scaling, scaling_of
from worker.adapters.errors import AdapterError
from worker.adapters.native import NativeAdditions, packed_adapter
from worker.adapters.targets import Spot, Target, spot_of, targets_of
from worker.models import Architecture, Shard
from worker.native import Library

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
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
    digest: str,
    kernels: Library | None,
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
    kernels: Library | None,
) -> Adapter:
    """In the engine's type, on its device, packed where the kernels take it."""
    placed = {
        place: tuple(
            replace(factor, down=factor.down.to(device, dtype), up=factor.up.to(device, dtype)) for factor in parts
        )
        for place, parts in factors.items()
    }
    every = [factor for parts in placed.values() for factor in parts]
    rank = max((factor.rank for factor in every), default=0)
    if not every or kernels is None or not NativeAdditions.serves(kernels, architecture, dtype):
        return Adapter(adapter_id, digest, rank, placed, sum(factor.num_bytes for factor in every))
    packed = packed_adapter(placed, architecture)
    return Adapter(adapter_id, digest, rank, {}, packed.num_bytes, packed)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise AdapterError(f"{path} has {path.stat().st_size} bytes; more than {max_bytes} are not read")
        return content(path)
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
    except (ValueError, RecursionError) as error:  # the first also where a number has too many digits
        raise AdapterError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return value


def _pairs(tensors: dict[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module, as PEFT names it. Raises AdapterError."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        found = _NAME.fullmatch(name)
        if found is None:
            what = next((what for part, what in _NOT_SERVED.items() if part in name), "no part of a LoRA adapter")
            raise AdapterError(f"{path}: tensor {name} is {what}, which is not served")
        if tensor.dtype not in FLOATS:
            raise AdapterError(f"{path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, not a float")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{path}: tensor {name} has values that are no finite numbers")
        sides.setdefault(found[1], {})[found[2]] = tensor
    if not sides:
        raise AdapterError(f"{path} holds no tensors")
    for module, pair in sides.items():
        for side in "AB":
            if side not in pair:
                raise AdapterError(f"{path} has no tensor base_model.model.{module}.lora_{side}.weight")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _factors(
    tensors: dict[str, Tensor], scaling: Scaling, shard: Shard, path: Path
) -> dict[tuple[int, Place], list[Factor]]:
    factors: dict[tuple[int, Place], list[Factor]] = {}
    for module, (down, up) in _pairs(tensors, path).items():
        spot = spot_of(module, scaling.parameters, shard.whole, path)
        target = targets_of(shard.whole, spot.layer)[spot.name]
        width = scaling.rank_of(spot.key) * max(1, target.num_experts)
        for side, tensor, shape in (("A", down, (width, target.num_in)), ("B", up, (target.num_out, width))):
            if tuple(tensor.shape) != shape:
                raise AdapterError(
                    f"{path}: tensor base_model.model.{module}.lora_{side}.weight is {_dims(tuple(tensor.shape))}, and"
                    f" this base with the rank of {CONFIG} takes {_dims(shape)}; is the adapter for another base?"
                )
        if spot.layer in shard.layers:
            for place, factor in _own(spot, target, down.float(), up.float() * scaling.factor(spot.key), shard):
                factors.setdefault((spot.layer - shard.layers.start, place), []).append(factor)
    return factors


def _own(spot: Spot, target: Target, down: Tensor, up: Tensor, shard: Shard) -> Iterator[tuple[Place, Factor]]:
    """What this rank's part of the decoder takes of it."""
    left = targets_of(shard.own, spot.layer - shard.layers.start)[spot.name].left
    # An expert is cut as an MLP is, whatever holds it.
    as_mlp = f"layers.{spot.layer}.{spot.name.replace('.experts', '')}.weight"
    _, part = shard.part(as_mlp, (target.num_out, target.num_in))
    for place, own_down, own_up in _matrices(spot, target, down, up):
        if part is not None and part.columns is not None:
            own_down = own_down[:, part.columns.start : part.columns.stop].contiguous()
        elif part is not None:
            own_up = part.of(own_up)
        factor = Factor(own_down, own_up, left)
        if place == "keys":
            yield from _by_head(factor, shard.own)
        else:
            yield place, factor


def _matrices(spot: Spot, target: Target, down: Tensor, up: Tensor) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """[rank, in] and [out, rank], gates before what they open, also of each expert of a parameter that holds them all:
    PEFT has their rows of ``down`` one expert after the other, and their columns of ``up`` in turns.
    """
    if not target.num_experts:
        yield target.product if spot.expert is None else (target.product, spot.expert), down, up
        return
    ups = up.view(len(up), -1, target.num_experts).permute(2, 0, 1).contiguous()
    if target.is_in_turns:
        ups = torch.cat((ups[:, 0::2], ups[:, 1::2]), 1)
    downs = down.view(target.num_experts, -1, down.shape[1])
    for expert, (own_down, own_up) in enumerate(zip(downs, ups, strict=True)):
        yield (target.product, expert), own_down, own_up


def _by_head(factor: Factor, own: Architecture) -> Iterator[tuple[Place, Factor]]:
    """Of the matrix that makes keys and values of the latent; LatentAttention multiplies queries with that of keys, the
    other way around."""
    latent, num_heads = own.latent, own.num_heads
    assert latent is not None
    keys, values = torch.split(factor.up.view(num_heads, -1, factor.rank), [latent.key_dim, latent.value_dim], 1)
    yield "keys", HeadFactor(keys.mT.contiguous(), factor.down.T.contiguous(), 0, num_heads)
    yield "values", HeadFactor(factor.down, values.contiguous(), 0, num_heads)


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
