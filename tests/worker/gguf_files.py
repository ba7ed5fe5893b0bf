"""GGUF files of tiny models, written by llama.cpp's own `gguf` package as its converter writes them, and the same
models with the weights that its dequantiser reads back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

KINDS = {"phi3": "Phi3ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
KINDS |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
KINDS |= {"mixtral": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
KINDS |= {"gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
KINDS |= {"gpt-oss": "GptOssForCausalLM", "deepseek2": "DeepseekV2ForCausalLM", "deepseek3": "DeepseekV3ForCausalLM"}
KINDS |= {"gemma": "GemmaForCausalLM", "smollm3": "SmolLM3ForCausalLM", "seed_oss": "SeedOssForCausalLM"}
KINDS |= {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "olmoe": "OlmoeForCausalLM"}
KINDS |= {"exaone": "LlamaForCausalLM", "exaone4": "Exaone4ForCausalLM", "internlm2": "LlamaForCausalLM"}
KINDS |= {"qwen2vl": "Qwen2ForCausalLM", "qwen3vl": "Qwen3ForCausalLM", "qwen3vlmoe": "Qwen3MoeForCausalLM"}
KINDS |= {"ernie4_5": "Ernie4_5ForCausalLM", "granite": "GraniteForCausalLM", "minicpm": "GraniteForCausalLM"}
KINDS |= {"glm4": "Glm4ForCausalLM", "chatglm": "GlmForCausalLM", "mistral3": "Ministral3ForCausalLM"}
KINDS |= {"granitemoe": "GraniteMoeSharedForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM"}
_CALLED = {"mistral": "llama", "mixtral": "llama", "deepseek3": "deepseek2", "olmo3": "olmo2"}
"""Those that llama.cpp calls otherwise."""
_TURNED = ("granite", "granitemoe", "internlm2", "llama", "minicpm", "mistral3", "smollm3")
_SCALED = ("granite", "granitemoe", "minicpm")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 32,
    "sliding_window": 9,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
_HALVES = {
    "Q4_K": {0: 6e-4, 2: 5e-3},
    "Q5_K": {0: 6e-4, 2: 5e-3},
    "Q6_K": {208: 4e-5},
    "Q3_K": {108: 1e-3},
    "Q2_K": {80: 5e-3, 82: 7e-3},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 6e-5},
}
"""Where the float16 scales of a block stand and about how large they are, of the kinds that the package reads but does
not write."""


def a_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """With weights large enough that greedy tokens are far from ties."""
    torch.manual_seed(seed)
    kind = getattr(transformers, KINDS[architecture])
    config = kind.config_class(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if name.endswith("sinks") else 0.08))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


def blocks(weight: np.ndarray[Any, Any], kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bytes of ``weight`` [rows, in] in this kind, and what they mean. A kind that nobody writes for us holds
    random codes instead of the weight."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        raw = gguf.quants.quantize(weight, number)
        return raw, np.asarray(gguf.quants.dequantize(raw, number), np.float32)
    block, size = gguf.GGML_QUANT_SIZES[number]
    chance = np.random.default_rng(abs(int(weight.flat[0] * 1e6)))
    codes = chance.integers(0, 256, (len(weight), weight.shape[1] // block, size), dtype=np.uint8)
    for at, scale in _HALVES[kind].items():
        scales = chance.uniform(0.5, 1.5, codes.shape[:2]) * scale
        codes[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    raw = codes.reshape(len(weight), -1)
    return raw, np.asarray(gguf.quants.dequantize(raw, number), np.float32)


def write(
    path: Path,
    architecture: str,
    model: Any,
    kinds: Mapping[str, str] | str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    experts_apart: bool = False,
    max_tensors: int = 0,
) -> Any:
    """``model`` as a GGUF of this architecture; afterwards it has the weights that the file means. ``kinds``: how
    matrices are stored, by the last part of their name in the file ("attn_q"), "experts" for theirs, "" for all others;
    with "ffn_gate_up_exps" gates and what they open are one, with "attn_qkv" queries, keys and values.
    ``experts_apart``: each has tensors of its own, as in old files. ``max_tensors``: in parts of so many each, which
    have their names of ``path``."""
    kinds = {"": kinds} if isinstance(kinds, str) else kinds
    own = _CALLED.get(architecture, architecture)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == own)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, own, split_max_tensors=max_tensors)
    _describe(writer, model.config, own, architecture)
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}.get(
            type(value), writer.add_array
        )(key, value)
    for name, parameter in model.named_parameters():
        module, _, ending = name.rpartition(".")
        if module.endswith(".experts"):
            _write_experts(writer, name, parameter, kinds, experts_apart, own == "gpt-oss")
            continue
        if architecture == "deepseek3" and module.endswith(".kv_b_proj"):
            _write_latent(writer, name, parameter, model.config, kinds)
            continue
        if ending == "sinks":
            module, ending = name, "weight"
        if module.endswith("shared_mlp.input_linear"):
            for part, half in zip(("gate", "up"), parameter.detach().chunk(2), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight", half.numpy())
            continue
        if "attn_qkv" in kinds and module.endswith((".q_proj", ".k_proj")):
            continue
        if "attn_qkv" in kinds and module.endswith(".v_proj"):
            attention = model.get_submodule(module.removesuffix(".v_proj"))
            parts = (getattr(attention, f"{part}_proj").get_parameter(ending) for part in "qkv")
            parameter, module = torch.cat([*parts]), f"blk.{name.split('.')[2]}.attn_qkv"
        if module.endswith("block_sparse_moe.router"):
            module = f"{module}.layer"
        if module.endswith("shared_expert_gate"):
            parameter = parameter.flatten()
        module = names.get_name(module) or module
        if module.endswith("gate_up_proj"):
            module = f"blk.{module.split('.')[2]}.ffn_up"
        weight = parameter.detach().numpy()
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
        last = module.rpartition(".")[2]
        is_turned = own in _TURNED and last in heads
        if is_turned:
            weight = _paired(weight, heads[last])
        if "norm" in module and own in ("gemma", "gemma2", "gemma3"):
            weight = weight + 1
        kind = kinds.get(last, kinds.get("", "F32"))
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(f"{module}.{ending}", np.ascontiguousarray(weight))
            continue
        raw, meant = blocks(np.ascontiguousarray(weight), kind)
        writer.add_tensor(f"{module}.{ending}", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(_apart(meant, heads[last]) if is_turned else meant.copy()))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_latent(writer: Any, name: str, parameter: torch.Tensor, config: Any, kinds: Mapping[str, str]) -> None:
    """Of each head what makes the keys, turned, and what makes the values."""
    by_head = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    for own, part in (("attn_k_b", keys.mT), ("attn_v_b", values)):
        weight, kind = part.detach().contiguous().numpy(), kinds.get(own, kinds.get("", "F32"))
        raw, meant = weight, weight
        if kind != "F32":
            raw, meant = blocks(weight.reshape(-1, weight.shape[2]), kind)
            raw = raw.reshape(*weight.shape[:2], -1)
        writer.add_tensor(f"blk.{name.split('.')[2]}.{own}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        with torch.no_grad():
            part.copy_(torch.from_numpy(meant.reshape(weight.shape).copy()))


def write_gpt_oss(path: Path, kinds: Mapping[str, str] | str = "F32", **metadata: Any) -> Path:
    """``metadata``: of the architecture."""
    write(path, "gpt-oss", a_model("gpt-oss", **GPT_OSS), kinds, {f"gpt-oss.{key}": metadata[key] for key in metadata})
    return path


def _write_experts(
    writer: Any, name: str, parameter: torch.Tensor, kinds: Mapping[str, str], are_apart: bool, are_biased: bool
) -> None:
    """[num_experts, out, in], where gates and what they open stand one behind the other; or, where there are biases
    (gpt-oss), [num_experts, in, out] and in turns."""
    _, _, index, *_, last = name.split(".")
    names: tuple[str, ...] = ("ffn_gate", "ffn_up") if last.startswith("gate_up_proj") else ("ffn_down",)
    if last == "gate_up_proj" and "ffn_gate_up_exps" in kinds:
        names = ("ffn_gate_up",)
    parts = parameter.chunk(len(names), dim=1)
    if are_biased:
        outermost = parameter.transpose(1, -1)
        parts = tuple(outermost[:, turn :: len(names)] for turn in range(len(names)))
    for part, own in zip(parts, names, strict=True):
        weight = part.detach().contiguous().numpy()
        if last.endswith("_bias"):
            writer.add_tensor(f"blk.{index}.{own}_exps.bias", weight)
            continue
        kind = kinds.get(f"{own}_exps", kinds.get("experts", kinds.get("", "F32")))
        raw, meant = weight, weight
        if kind != "F32":
            raw, meant = blocks(weight.reshape(-1, weight.shape[2]), kind)
            raw = raw.reshape(*weight.shape[:2], -1)
        number = gguf.GGMLQuantizationType[kind]
        if are_apart:
            for expert, alone in enumerate(raw):
                writer.add_tensor(f"blk.{index}.{own}.{expert}.weight", alone, raw_dtype=number)
        else:
            writer.add_tensor(f"blk.{index}.{own}_exps.weight", raw, raw_dtype=number)
        with torch.no_grad():
            part.copy_(torch.from_numpy(meant.reshape(weight.shape).copy()))


def _describe(writer: Any, config: Any, architecture: str, family: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if family == "deepseek3" else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    if architecture == "deepseek2":
        _describe_deepseek(writer, config, ropes, family)
        head_dim = config.qk_rope_head_dim
    elif architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * ropes.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    counts = (getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    if num_experts := next(filter(None, counts), None):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        inner = config.intermediate_size if architecture == "gpt-oss" else None
        if inner := getattr(config, "moe_intermediate_size", inner):
            writer.add_expert_feed_forward_length(inner)
    writer.add_eos_token_id(config.eos_token_id)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if architecture in ("exaone4", "olmo2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    stretched = ropes.get("full_attention", ropes)
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(ropes["mscale_all_dim"])
        writer.add_attn_temperature_scale(ropes["llama_4_scaling_beta"])
    if shared := getattr(config, "shared_expert_intermediate_size", getattr(config, "shared_intermediate_size", 0)):
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture in ("gpt-oss", "mistral3", "olmo2") and stretched["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(stretched["factor"])
        writer.add_rope_scaling_orig_ctx_len(stretched["original_max_position_embeddings"])
    if architecture in _SCALED:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _describe_deepseek(writer: Any, config: Any, ropes: Mapping[str, Any], family: str) -> None:
    if family == "deepseek3":
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(family == "deepseek3" and config.norm_topk_prob)
    if config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if ropes["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(ropes["factor"])
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * ropes["mscale_all_dim"])


def _paired(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp turns them: the two rows of an angle side by side."""
    split = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _apart(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    split = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))
