"""What the configurations of all families have in common, as fields of an Architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.models.architecture import Activation, Mixture
from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.rope import reach, rope_of

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def common(fields: Fields, windows: tuple[int, ...] = ()) -> dict[str, Any]:
    """What every family has."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_layers = fields.num_layers()
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"the {num_heads} attention heads of this {fields.architecture}"
            f" cannot share {num_kv_heads} key-value heads evenly"
        )
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    activation = fields.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"the activation {activation} of this {fields.architecture} is not supported")
    return {
        "name": fields.architecture,
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": fields.not_negative("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "windows": windows or (0,) * num_layers,
        "activation": _ACTIVATIONS[activation],
        "tied": fields.flag("tie_word_embeddings", False),
        "eos_token_ids": token_ids(fields.raw.get("eos_token_id"), fields.place),
        "dtype": _dtype(fields),
    }


def mixture_of(fields: Fields, count: str, is_normed: bool, *names: str) -> Mixture:
    """``names``: of its tensors, where they are not the usual ones."""
    num_experts, num_chosen = fields.positive(count), fields.positive("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.wrong("num_experts_per_tok", num_chosen)
    return Mixture(num_experts, num_chosen, is_normed, *names)


def layer_kinds(fields: Fields, is_sliding: Callable[[int], bool]) -> list[str]:
    """``layer_types`` where the file has it, else the family's rule."""
    num_layers = fields.num_layers()
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return ["sliding_attention" if is_sliding(layer) else "full_attention" for layer in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.wrong("layer_types", kinds)
    return kinds


def token_ids(value: object, place: str | Path) -> tuple[int, ...]:
    """``eos_token_id`` of config.json or generation_config.json, which is at ``place``: absent, one, or a list. Raises
    ModelError.
    """
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in found):
        raise ModelError(f"{place} has an impossible eos_token_id: {str(value)[:80]}")
    return tuple(found)


def beyond_float16(dtype: str) -> str:
    """Of a family whose activations are too large for float16, whatever its files are in."""
    return "bfloat16" if dtype == "float16" else dtype


def _dtype(fields: Fields) -> str:
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else "float32"


def one_rope(fields: Fields, is_phi3: bool = False) -> dict[str, Any]:
    """``ropes``, ``layer_ropes`` and ``max_positions`` of a family that turns all layers alike."""
    max_positions = fields.positive("max_position_embeddings", 2048)
    rope = rope_of(fields, scaling_of(fields), max_positions, 10_000.0, is_phi3)
    return {"ropes": (rope,), "layer_ropes": (0,) * fields.num_layers(), "max_positions": reach(rope)}


def scaling_of(fields: Fields) -> Fields | None:
    """What is said of ropes, in ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before); None: nothing.
    Raises ModelError where they say two things."""
    both = [table for name in ("rope_parameters", "rope_scaling") if (table := fields.table(name)) and table.raw]
    if len(both) > 1 and _stretching(both[0]) != _stretching(both[1]):
        raise ModelError(f"{fields.place} has both rope_parameters and rope_scaling, which say different things")
    return both[0] if both else None


def _stretching(scaling: Fields) -> dict[str, Any]:
    """All but the angles of what is stretched, which stand elsewhere beside ``rope_scaling``."""
    said = {name: value for name, value in scaling.raw.items() if name not in ("type", "rope_theta")}
    return {"rope_type": scaling.raw.get("type", "default"), **said}
