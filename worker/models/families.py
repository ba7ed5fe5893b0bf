"""From config.json to an Architecture: one small function for each family, defaults as the family's own configuration
has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from worker.models.architecture import Activation, Architecture, Rope
from worker.models.errors import ModelError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class Fields:
    """config.json, read with types: a value of the wrong one is a ModelError that names it. A null counts as absent."""

    def __init__(self, raw: dict[str, Any], architecture: str) -> None:
        self.raw = raw
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.wrong(key, value)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value)
        return value

    def table(self, key: str) -> Fields | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value)
        return Fields(value, self.architecture)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
            raise self.wrong(key, value)
        return tuple(float(item) for item in value)

    def wrong(self, key: str, value: object) -> ModelError:
        if value is None:
            return ModelError(f"config.json of this {self.architecture} lacks {key}")
        return ModelError(f"config.json of this {self.architecture} has an impossible {key}: {str(value)[:80]}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Raises ModelError, naming the architecture where it is not one of ``FAMILIES``."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        raise ModelError("config.json does not name its architectures")
    if name not in FAMILIES:
        raise ModelError(f"the architecture {name} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise ModelError(f"this {name} is quantised ({method}); quantised checkpoints are not supported")
    return FAMILIES[name](Fields(config, name))


def llama(fields: Fields) -> Architecture:
    return Architecture(
        **_common(fields, num_kv_heads=None),
        **_one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(fields: Fields) -> Architecture:
    common = _common(fields, num_kv_heads=8, max_positions=131_072)
    return Architecture(**{**common, "windows": _everywhere(fields)}, **_one_rope(fields, max_positions=131_072))


FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
}


def _common(
    fields: Fields,
    num_kv_heads: int | None,
    max_positions: int = 2048,
    head_dim: int | None = None,
    activation: str = "silu",
    activation_key: str = "hidden_act",
    tied: bool = False,
) -> dict[str, Any]:
    """What every family has; arguments are the family's defaults. ``num_kv_heads`` None: as many as heads."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    num_kv_heads = fields.positive("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    head_dim = fields.positive("head_dim", head_dim or hidden_size // num_heads)
    activation = fields.text(activation_key, activation)
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
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "windows": (0,) * num_layers,
        "activation": _ACTIVATIONS[activation],
        "tied": fields.flag("tie_word_embeddings", tied),
        "eos_token_ids": token_ids(fields.raw.get("eos_token_id")),
        "dtype": _dtype(fields),
    }


def _everywhere(fields: Fields) -> tuple[int, ...]:
    """The same window in all layers."""
    return (fields.integer("sliding_window", 0),) * fields.positive("num_hidden_layers")


def token_ids(value: object) -> tuple[int, ...]:
    """``eos_token_id`` of config.json or generation_config.json: absent, one, or a list."""
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()


def _dtype(fields: Fields) -> str:
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else "float32"


def _one_rope(fields: Fields, max_positions: int = 2048, theta: float = 10_000.0) -> dict[str, Any]:
    """``ropes``, ``layer_ropes`` and ``max_positions`` of a family that turns all layers alike."""
    max_positions = fields.positive("max_position_embeddings", max_positions)
    rope = rope_of(fields, fields.table("rope_parameters") or fields.table("rope_scaling"), max_positions, theta)
    return {"ropes": (rope,), "layer_ropes": (0,) * fields.positive("num_hidden_layers"), "max_positions": _reach(rope)}


def _reach(rope: Rope) -> int:
    """Tokens that the rope is stretched to: YaRN's configurations leave max_position_embeddings at the context of
    pretraining.
    """
    if rope.kind == "yarn":
        return max(rope.max_positions, int(rope.original_max_positions * rope.factor))
    return int(rope.max_positions * rope.factor) if rope.kind == "dynamic" else rope.max_positions


def rope_of(fields: Fields, scaling: Fields | None, max_positions: int, theta: float) -> Rope:
    """From ``rope_parameters`` (transformers 5) or ``rope_scaling`` beside ``rope_theta`` (before it)."""
    heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // heads)
    scaling = scaling or Fields({}, fields.architecture)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)
    theta = scaling.number("rope_theta", fields.number("rope_theta", theta))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if theta <= 0 or not 0 < partial <= 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json of this {fields.architecture} has an impossible rope:"
            f" {rotary_dim} of {head_dim} dimensions, theta {theta}"
        )
    original = fields.raw.get("original_max_position_embeddings") or scaling.integer(
        "original_max_position_embeddings", max_positions
    )
    common: dict[str, Any] = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim, "max_positions": max_positions}
    match kind:
        case "default":
            return Rope(**common)
        case "linear" | "dynamic":
            return Rope(**common, factor=_factor(scaling))
        case "proportional":
            return Rope(**common, factor=scaling.number("factor", 1.0), partial_factor=partial)
        case "llama3":
            return Rope(
                **common,
                factor=_factor(scaling),
                original_max_positions=original,
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
            )
        case "yarn":
            factor = _factor(scaling, max_positions / original)
            return Rope(
                **common,
                factor=factor,
                original_max_positions=original,
                attention_factor=_yarn_attention(scaling, factor),
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                truncate=scaling.flag("truncate", True),
            )
        case "longrope":
            factor = scaling.number("factor", max_positions / original)
            stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
            if len(short) != rotary_dim // 2 or len(long) != rotary_dim // 2:
                raise ModelError(
                    f"the longrope factors of this {fields.architecture} are not {rotary_dim // 2} numbers each"
                )
            return Rope(
                **common,
                factor=factor,
                original_max_positions=original,
                attention_factor=scaling.number("attention_factor", stretch),
                short_factors=short,
                long_factors=long,
            )
    raise ModelError(f"the RoPE scaling {kind} of this {fields.architecture} is not supported")


def _factor(scaling: Fields, default: float | None = None) -> float:
    factor = scaling.number("factor", default)
    if factor < 1:
        raise scaling.wrong("factor", factor)
    return factor


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """The growth of attention's temperature, YaRN section 3.4; DeepSeek's mscale pair divides two of them."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    both = bool(mscale and mscale_all)
    return scaling.number("attention_factor", growth(mscale) / growth(mscale_all) if both else growth(1.0))
