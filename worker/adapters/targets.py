"""Which of a decoder's matrices adapters may change, and the names that PEFT has for them.

A matrix that is a module is named by it. Experts are modules in some checkpoints, and in others, as transformers has
them in memory, parameters of one module, each of which holds a matrix of every expert: PEFT wraps such a module once
for each of its parameters that is changed (``target_parameters``, its ParamWrapper), the last one outermost, and its
files tell them apart by how deep they are wrapped alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from worker.adapters.adapter import Product
from worker.adapters.errors import AdapterError
from worker.models.architecture import Architecture, Latent

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_WRAPPED = ".base_layer"
_OF_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Parameters that a module of all experts may have, in their order there."""


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix, or those of all experts."""

    product: Product
    """That it is part of."""
    left: int
    """The first column of the product that is its own."""
    num_out: int
    num_in: int
    num_experts: int = 0
    """Of a parameter that holds a matrix of each."""
    is_in_turns: bool = False
    """A gate and what it opens are neighbours in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Spot:
    """What one pair of an adapter's tensors changes."""

    key: str
    """Its name in the base, by which patterns of ranks and alphas know it."""
    layer: int
    name: str
    """One of ``targets_of`` the layer."""
    expert: int | None
    """Of a module that is one expert's."""


def spot_of(module: str, parameters: Collection[str], architecture: Architecture, path: Path) -> Spot:
    """Of "model.layers.0.self_attn.q_proj", or "model.layers.0.mlp.experts.base_layer" where ``parameters`` say which
    of the module's are changed. Raises AdapterError.
    """
    key = _unwrapped(module, parameters)
    root = next((root for root in architecture.tensor_roots if key.startswith(f"{root}layers.")), None)
    found = _LAYER.fullmatch(key.removeprefix(root)) if root is not None else None
    layer = int(found[1]) if found is not None else 0
    targets = targets_of(architecture, layer)
    name = found[2].removesuffix(".weight").replace("block_sparse_moe.", "mlp.") if found is not None else ""
    number = _EXPERT.search(name)
    name = _EXPERT.sub("*", name)
    if name not in targets:
        known = ", ".join(name.partition(".")[2] for name in targets)
        raise AdapterError(
            f"{path}: it changes {key}, which this {architecture.name} does not have or which is not served; served"
            f" are {known}"
        )
    num_experts = 0 if architecture.mixture is None else architecture.mixture.num_experts
    for what, index, count in (
        ("layers", layer, architecture.num_layers),
        ("experts", int(number[0]) if number is not None else -1, num_experts),
    ):
        if index >= count:
            raise AdapterError(
                f"{path}: it changes {key}, and this {architecture.name} has {count} {what}; the adapter is for another"
                " base"
            )
    return Spot(key, layer, name, int(number[0]) if number is not None else None)


def _unwrapped(module: str, parameters: Collection[str]) -> str:
    """The module, or which of its parameters is changed."""
    bare, depth = module, 0
    while bare.endswith(_WRAPPED):
        bare, depth = bare.removesuffix(_WRAPPED), depth + 1
    names = [f"{bare}.{name}" for name in (_OF_EXPERTS if bare.endswith(".experts") else ("weight",))]
    changed = [name for name in names if any(f".{name}".endswith(f".{parameter}") for parameter in parameters)]
    return changed[-1 - depth] if depth < len(changed) else module


def targets_of(architecture: Architecture, layer: int = 0) -> dict[str, Target]:
    """Of one layer, by the name below it; ``*`` is the number of an expert."""
    hidden, inner, mixture = architecture.hidden_size, architecture.intermediate_size, architecture.mixture
    attention = _attention_of(architecture)
    if architecture.fused:
        return {
            **attention,
            "mlp.gate_up_proj": Target("gate_up", 0, 2 * inner, hidden),
            "mlp.down_proj": Target("down", 0, hidden, inner),
        }
    if mixture is None or layer < mixture.num_dense:
        return {**attention, **_mlp("mlp", hidden, inner if mixture is None else mixture.dense_size)}
    num_experts, experts = mixture.num_experts, "mlp.experts"
    targets = {
        **attention,
        mixture.router.replace("block_sparse_moe.", "mlp."): Target("router", 0, num_experts, hidden),
        f"{experts}.gate_up_proj": Target("gate_up", 0, 2 * inner, hidden, num_experts, mixture.is_stacked),
        f"{experts}.down_proj": Target("down", 0, hidden, inner, num_experts),
    }
    if not mixture.is_stacked:
        targets |= _mlp(f"{experts}.*", hidden, inner, (mixture.gate, mixture.up, mixture.down))
    if mixture.shared_size:
        of_shared: tuple[Product, Product] = ("shared_gate_up", "shared_down")
        targets |= _mlp("mlp.shared_experts", hidden, mixture.shared_size, products=of_shared)
    return targets


def _attention_of(architecture: Architecture) -> dict[str, Target]:
    hidden, num_heads, latent = architecture.hidden_size, architecture.num_heads, architecture.latent
    if latent is not None:
        return _latent(latent, hidden, num_heads)
    queries, keys = num_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    output = Target("output", 0, hidden, queries)
    if architecture.fused:
        return {"self_attn.qkv_proj": Target("qkv", 0, queries + 2 * keys, hidden), "self_attn.o_proj": output}
    return {
        "self_attn.q_proj": Target("qkv", 0, queries, hidden),
        "self_attn.k_proj": Target("qkv", queries, keys, hidden),
        "self_attn.v_proj": Target("qkv", queries + keys, keys, hidden),
        "self_attn.o_proj": output,
    }


def _latent(latent: Latent, hidden: int, num_heads: int) -> dict[str, Target]:
    queries, rank = num_heads * (latent.key_dim + latent.rope_dim), latent.query_rank
    targets = {
        "self_attn.kv_a_proj_with_mqa": Target("compressed", 0, latent.rank + latent.rope_dim, hidden),
        "self_attn.kv_b_proj": Target("keys", 0, num_heads * (latent.key_dim + latent.value_dim), latent.rank),
        "self_attn.o_proj": Target("output", 0, hidden, num_heads * latent.value_dim),
    }
    if not rank:
        return {"self_attn.q_proj": Target("queries", 0, queries, hidden), **targets}
    return {
        "self_attn.q_a_proj": Target("compressed_queries", 0, rank, hidden),
        "self_attn.q_b_proj": Target("queries", 0, queries, rank),
        **targets,
    }


def _mlp(
    at: str,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    products: tuple[Product, Product] = ("gate_up", "down"),
) -> dict[str, Target]:
    gate, up, down = (f"{at}.{name}" for name in names)
    gate_up_product, down_product = products
    return {
        gate: Target(gate_up_product, 0, inner, hidden),
        up: Target(gate_up_product, inner, inner, hidden),
        down: Target(down_product, 0, hidden, inner),
    }
