"""From config.json to an Architecture: one small function for each family, defaults as the family's own configuration
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker.models.architecture import SWIGLU_ALPHA, SWIGLU_LIMIT, Architecture
from worker.models.deepseek import deepseek
from worker.models.errors import ModelError
from worker.models.facts import beyond_float16, common, layer_kinds, mixture_of, one_rope, scaling_of
from worker.models.fields import Fields
from worker.models.rope import reach, rope_of


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
    """Llama 2 and 3 (arXiv:2307.09288, 2407.21783), by whose form the others are told."""
    return Architecture(
        **common(fields),
        **one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(fields: Fields) -> Architecture:
    """Llama with a sliding window in all layers, if any (arXiv:2310.06825)."""
    window = fields.integer("sliding_window", 0 if "sliding_window" in fields.raw else 4096)  # a null takes it away
    fields = fields.over(num_key_value_heads=8, max_position_embeddings=131_072)
    return Architecture(**common(fields, windows=(window,) * fields.num_layers()), **one_rope(fields))


def qwen2(fields: Fields) -> Architecture:
    """Llama with biases on queries, keys and values (arXiv:2407.10671)."""
    fields = fields.over(num_key_value_heads=32, max_position_embeddings=32_768)
    return Architecture(**common(fields, windows=_qwen_windows(fields)), **one_rope(fields), qkv_bias=True)


def qwen3(fields: Fields) -> Architecture:
    """Qwen 2 without those biases, and with a norm of each head's queries and keys (arXiv:2505.09388)."""
    fields = fields.over(num_key_value_heads=32, max_position_embeddings=32_768, head_dim=128)
    return Architecture(
        **common(fields, windows=_qwen_windows(fields)),
        **one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        qk_norm="head",
    )


def gemma2(fields: Fields) -> Architecture:
    """Norms before and after attention and MLP, scores and logits capped, a window in every other layer
    (arXiv:2408.00118)."""
    fields = fields.over(
        **_GEMMA_SIZES,
        vocab_size=256_000,
        max_position_embeddings=8192,
        # A null takes the cap away.
        attn_logit_softcapping=0.0 if "attn_logit_softcapping" in fields.raw else 50.0,
        final_logit_softcapping=0.0 if "final_logit_softcapping" in fields.raw else 30.0,
    )
    kinds = layer_kinds(fields, lambda layer: layer % 2 == 0)
    return Architecture(**_gemma(fields, kinds), **one_rope(fields))


def gemma3(fields: Fields) -> Architecture:
    """Gemma 2 with norms of queries and keys in place of caps, and five layers with windows, and a RoPE of their own,
    for each without (arXiv:2503.19786)."""
    fields = fields.over(**_GEMMA_SIZES, vocab_size=262_208, max_position_embeddings=131_072)
    pattern = fields.positive("sliding_window_pattern", 6)
    kinds = layer_kinds(fields, lambda layer: (layer + 1) % pattern != 0)
    max_positions = fields.positive("max_position_embeddings")
    scaling, nested = scaling_of(fields), fields.table("rope_parameters")
    if nested is not None and nested.raw:
        scalings = nested.table("full_attention"), nested.table("sliding_attention")
    else:
        local = Fields({"rope_theta": fields.number("rope_local_base_freq", 10_000.0)}, fields.architecture)
        scalings = scaling, local
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
    """Llama with matrices stored fused, and LongRoPE where the context is long (arXiv:2404.14219)."""
    fields = fields.over(
        vocab_size=32_064, max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    window = fields.integer("sliding_window", 0)
    return Architecture(
        **common(fields, windows=(window,) * fields.num_layers()),
        **one_rope(fields, is_phi3=True),
        fused=True,
    )


def olmo2(fields: Fields) -> Architecture:
    """Norms behind attention and MLP in place of those before, and of whole queries and keys (arXiv:2501.00656)."""
    fields = fields.over(rms_norm_eps=1e-5)
    return Architecture(
        **common(fields),
        **one_rope(fields),
        qkv_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        qk_norm="width",
        attention_pre_norm="",
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="",
        mlp_post_norm="post_feedforward_layernorm",
    )


def mixtral(fields: Fields) -> Architecture:
    """Mistral with two of eight experts for each token (arXiv:2401.04088)."""
    fields = fields.over(num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, sliding_window=0)
    mixture = mixture_of(
        fields, "num_local_experts", True, "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"
    )
    return replace(mistral(fields), mixture=mixture)


def qwen3_moe(fields: Fields) -> Architecture:
    """Qwen 3 with experts in every layer (arXiv:2505.09388)."""
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
        mixture=mixture_of(fields, "num_experts", fields.flag("norm_topk_prob", False)),
    )


def olmoe(fields: Fields) -> Architecture:
    """Small experts, eight of 64 for each token, and norms of whole queries and keys (arXiv:2409.02060)."""
    fields = fields.over(
        num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5, intermediate_size=2048, max_position_embeddings=4096
    )
    bias = fields.flag("attention_bias", False)
    return Architecture(
        **common(fields),
        **one_rope(fields),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="width",
        mixture=mixture_of(fields, "num_experts", fields.flag("norm_topk_prob", False)),
    )


def gpt_oss(fields: Fields) -> Architecture:
    """Experts with clamped SwiGLU and biases, a learned sink in each head's softmax, a window in every other layer
    (arXiv:2508.10925)."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    fields = fields.over(
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        rope_scaling=None if fields.raw.get("rope_parameters") else yarn,
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
    )
    window, bias = fields.positive("sliding_window"), fields.flag("attention_bias", True)
    kinds = layer_kinds(fields, lambda layer: layer % 2 == 0)
    facts = common(fields, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds))
    facts |= {"activation": "clamped_swiglu", "dtype": beyond_float16(facts["dtype"])}
    return Architecture(
        **facts,
        **one_rope(fields),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        mixture=replace(mixture_of(fields, "num_local_experts", True, "mlp.router"), is_stacked=True),
    )


def computes(config: dict[str, Any], name: str) -> bool:
    """Whether the decoder computes a model of this architecture: it knows the family, and this one has no layers that
    it does not know. A few mixtures have some layers without experts, or clip what attention multiplies, or clamp what
    experts do at other values than all published ones.
    """
    odd = config.get("mlp_only_layers") or config.get("decoder_sparse_step") not in (None, 1) or config.get("clip_qkv")
    clamps = config.get("swiglu_alpha") or SWIGLU_ALPHA, config.get("swiglu_limit") or SWIGLU_LIMIT
    odd = odd or clamps != (SWIGLU_ALPHA, SWIGLU_LIMIT)
    if config.get("model_type") in RENAMED:
        return False
    name = HEADLESS.get(name, name)
    if FAMILIES.get(name) is deepseek:
        return not config.get("mlp_bias")
    return name in FAMILIES and not (odd and FAMILIES[name] in (qwen3_moe, olmoe, gpt_oss))


FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
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


def _gemma(fields: Fields, kinds: list[str]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError(f"this {fields.architecture} attends in both directions, which does not generate text")
    window = fields.positive("sliding_window")
    # What others' files have under this name nobody reads.
    fields = Fields({**fields.raw, "hidden_act": fields.raw["hidden_activation"]}, fields.architecture, fields.place)
    facts = common(fields, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds))
    return {
        **facts,
        "dtype": beyond_float16(facts["dtype"]),
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.not_negative("attn_logit_softcapping", 0.0),
        "logits_softcap": fields.not_negative("final_logit_softcapping", 0.0),
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
        window if kind == "sliding_attention" else 0 for kind in layer_kinds(fields, lambda layer: layer >= first)
    )


HEADLESS = {
    f"{name.removesuffix('ForCausalLM')}Model": name
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
}
"""As models for vectors are saved; the families that they are of. They are given the embedding as their head."""

RENAMED = ("exaone",)
"""Types of models that are of one of ``FAMILIES`` but for the names of their tensors, which transformers translates."""
