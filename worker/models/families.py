"""From config.json to an Architecture: one small function for each family, defaults as the family's own configuration
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker.models.architecture import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Architecture, Mixture
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


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Raises ModelError, naming the architecture where it is not one of ``FAMILIES``."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        raise ModelError("config.json does not name its architectures")
    if name in HEADLESS:
        return replace(FAMILIES[HEADLESS[name]](Fields(config, name)), tied=True, tensor_roots=("", "model."))
    if name not in FAMILIES:
        raise ModelError(f"the architecture {name} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name](Fields(config, name))


def llama(fields: Fields) -> Architecture:
    return Architecture(
        **_common(fields),
        **_one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(fields: Fields) -> Architecture:
    fields = fields.over(num_key_value_heads=8, max_position_embeddings=131_072)
    window = fields.integer("sliding_window", 0)
    return Architecture(**_common(fields, windows=(window,) * fields.num_layers()), **_one_rope(fields))


def qwen2(fields: Fields) -> Architecture:
    fields = fields.over(num_key_value_heads=32, max_position_embeddings=32_768)
    return Architecture(**_common(fields, windows=_qwen_windows(fields)), **_one_rope(fields), qkv_bias=True)


def qwen3(fields: Fields) -> Architecture:
    fields = fields.over(num_key_value_heads=32, max_position_embeddings=32_768, head_dim=128)
    return Architecture(
        **_common(fields, windows=_qwen_windows(fields)),
        **_one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        qk_norm="head",
    )


def gemma2(fields: Fields) -> Architecture:
    fields = fields.over(
        **_GEMMA_SIZES,
        vocab_size=256_000,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    kinds = _layer_kinds(fields, lambda layer: layer % 2 == 0)
    return Architecture(**_gemma(fields, kinds), **_one_rope(fields))


def gemma3(fields: Fields) -> Architecture:
    fields = fields.over(**_GEMMA_SIZES, vocab_size=262_208, max_position_embeddings=131_072)
    pattern = fields.positive("sliding_window_pattern", 6)
    kinds = _layer_kinds(fields, lambda layer: (layer + 1) % pattern != 0)
    max_positions = fields.positive("max_position_embeddings")
    nested = fields.table("rope_parameters")
    if nested:
        scalings = nested.table("full_attention"), nested.table("sliding_attention")
    else:
        local = Fields({"rope_theta": fields.number("rope_local_base_freq", 10_000.0)}, fields.architecture)
        scalings = fields.table("rope_scaling"), local
    full = rope_of(fields, scalings[0], max_positions, 1_000_000.0)
    sliding = rope_of(fields, scalings[1], max_positions, 10_000.0)
    return Architecture(
        **_gemma(fields, kinds),
        ropes=(full, sliding),
        layer_ropes=tuple(int(kind == "sliding_attention") for kind in kinds),
        max_positions=reach(full),
        qk_norm="head",
    )


def gemma3_multimodal(fields: Fields) -> Architecture:
    """The language model inside; pictures stay outside."""
    text = fields.table("text_config")
    if text is None:
        raise fields.wrong("text_config", None)
    outer = {key: fields.raw.get(key) for key in ("eos_token_id", "dtype", "torch_dtype")}
    inner = Fields(
        {**{key: value for key, value in outer.items() if value is not None}, **text.raw}, fields.architecture
    )
    return replace(gemma3(inner), tensor_roots=("model.language_model.", "language_model.model."))


def phi3(fields: Fields) -> Architecture:
    fields = fields.over(
        vocab_size=32_064, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    window = fields.integer("sliding_window", 0)
    return Architecture(
        **_common(fields, windows=(window,) * fields.num_layers()),
        **_one_rope(fields, is_phi3=True),
        fused=True,
    )


def olmo2(fields: Fields) -> Architecture:
    fields = fields.over(rms_norm_eps=1e-5)
    return Architecture(
        **_common(fields),
        **_one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        qk_norm="width",
        attention_pre_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    )


def mixtral(fields: Fields) -> Architecture:
    fields = fields.over(num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5)
    mixture = _mixture(
        fields, "num_local_experts", True, "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"
    )
    return replace(mistral(fields), mixture=mixture)


def qwen3_moe(fields: Fields) -> Architecture:
    fields = fields.over(
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        num_experts=fields.integer("num_local_experts", 128),
    )
    dense = qwen3(fields.over(head_dim=fields.positive("hidden_size") // fields.positive("num_attention_heads")))
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
    return replace(
        dense,
        intermediate_size=fields.positive("moe_intermediate_size"),
        windows=(window,) * dense.num_layers,
        mixture=_mixture(fields, "num_experts", fields.flag("norm_topk_prob", False)),
    )


def olmoe(fields: Fields) -> Architecture:
    fields = fields.over(
        num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5, intermediate_size=2048, max_position_embeddings=4096
    )
    bias = fields.flag("attention_bias", False)
    return Architecture(
        **_common(fields),
        **_one_rope(fields),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="width",
        mixture=_mixture(fields, "num_experts", fields.flag("norm_topk_prob", False)),
    )


def gpt_oss(fields: Fields) -> Architecture:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    fields = fields.over(
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        rope_scaling=yarn,
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
    )
    window, bias = fields.positive("sliding_window"), fields.flag("attention_bias", True)
    kinds = _layer_kinds(fields, lambda layer: layer % 2 == 0)
    common = _common(fields, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds))
    return Architecture(
        **{**common, "activation": "clamped_swiglu"},
        **_one_rope(fields),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        mixture=replace(_mixture(fields, "num_local_experts", True, "mlp.router"), is_stacked=True),
    )


def computes(config: dict[str, Any], name: str) -> bool:
    """Whether the decoder computes a model of this architecture: it knows the family, and this one has no layers that
    it does not know. A few mixtures have some layers without experts, or clip what attention multiplies, or clamp what
    experts do at other values than all published ones.
    """
    odd = config.get("mlp_only_layers") or config.get("decoder_sparse_step") not in (None, 1) or config.get("clip_qkv")
    clamps = config.get("swiglu_alpha") or SWIGLU_ALPHA, config.get("swiglu_limit") or SWIGLU_LIMIT
    odd = odd or clamps != (SWIGLU_ALPHA, SWIGLU_LIMIT)
    name = HEADLESS.get(name, name)
    return name in FAMILIES and not (odd and FAMILIES[name] in (qwen3_moe, olmoe, gpt_oss))


FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_multimodal,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}

_GEMMA_SIZES: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Published Gemma files leave out what equals these."""


def _common(fields: Fields, windows: tuple[int, ...] = ()) -> dict[str, Any]:
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
    activation = fields.text("hidden_activation", fields.text("hidden_act", "silu"))
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
        "windows": windows or (0,) * num_layers,
        "activation": _ACTIVATIONS[activation],
        "tied": fields.flag("tie_word_embeddings", False),
        "eos_token_ids": token_ids(fields.raw.get("eos_token_id")),
        "dtype": _dtype(fields),
    }


def _mixture(fields: Fields, count: str, is_normed: bool, *names: str) -> Mixture:
    """``names``: of its tensors, where they are not the usual ones."""
    num_experts, num_chosen = fields.positive(count), fields.positive("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.wrong("num_experts_per_tok", num_chosen)
    return Mixture(num_experts, num_chosen, is_normed, *names)


def _gemma(fields: Fields, kinds: list[str]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError(f"this {fields.architecture} attends in both directions, which does not generate text")
    window = fields.positive("sliding_window")
    return {
        **_common(fields, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds)),
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.number("attn_logit_softcapping", 0.0),
        "logits_softcap": fields.number("final_logit_softcapping", 0.0),
        "embedding_scale": fields.positive("hidden_size") ** 0.5,
        "norm_offset": 1.0,
        "qkv_bias": fields.flag("attention_bias", False),
        "output_bias": fields.flag("attention_bias", False),
        "attention_post_norm": "post_attention_layernorm",
        "mlp_pre_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
    first = fields.integer("max_window_layers", 28)
    return tuple(
        window if kind == "sliding_attention" else 0 for kind in _layer_kinds(fields, lambda layer: layer >= first)
    )


def _layer_kinds(fields: Fields, is_sliding: Callable[[int], bool]) -> list[str]:
    """``layer_types`` where the file has it, else the family's rule."""
    num_layers = fields.num_layers()
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return ["sliding_attention" if is_sliding(layer) else "full_attention" for layer in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.wrong("layer_types", kinds)
    return kinds


def token_ids(value: object) -> tuple[int, ...]:
    """``eos_token_id`` of config.json or generation_config.json: absent, one, or a list."""
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()


def _dtype(fields: Fields) -> str:
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else "float32"


def _one_rope(fields: Fields, is_phi3: bool = False) -> dict[str, Any]:
    """``ropes``, ``layer_ropes`` and ``max_positions`` of a family that turns all layers alike."""
    max_positions = fields.positive("max_position_embeddings", 2048)
    scaling = fields.table("rope_parameters") or fields.table("rope_scaling")
    rope = rope_of(fields, scaling, max_positions, 10_000.0, is_phi3)
    return {"ropes": (rope,), "layer_ropes": (0,) * fields.num_layers(), "max_positions": reach(rope)}


HEADLESS = {
    f"{name.removesuffix('ForCausalLM')}Model": name
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
}
"""As models for vectors are saved; the families that they are of. They are given the embedding as their head."""
