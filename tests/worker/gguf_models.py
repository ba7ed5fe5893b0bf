"""Tiny models of each architecture that is served as GGUF: what ``gguf_files`` calls it, and what its configuration
says beside the sizes."""

from __future__ import annotations

from typing import Any

from tests.worker import gguf_files

ROPE = {"rope_type": "default", "rope_theta": 5e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 0.9, "mscale_all_dim": 0.9}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": ROPE}),
    "llama, tied, biased, wide heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3moe": (
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": ("gpt-oss", gguf_files.GPT_OSS),
    "deepseek2": ("deepseek2", {**gguf_files.DEEPSEEK, "q_lora_rank": None, "rope_parameters": ROPE}),
    "deepseek2, groups of experts": (
        "deepseek2",
        {**gguf_files.DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek3": ("deepseek3", {**gguf_files.DEEPSEEK, "n_group": 2, "rope_parameters": YARN}),
    "deepseek3, not normed": ("deepseek3", {**gguf_files.DEEPSEEK, "norm_topk_prob": False}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3, turning half": ("phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "gemma2": ("gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 9}),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "ernie4_5": ("ernie4_5", {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": ROPE}),
    "exaone": ("exaone", {"rope_parameters": ROPE}),
    "exaone4": (
        "exaone4",
        {"sliding_window": None, "layer_types": 3 * ["full_attention"], "head_dim": 64, "rope_parameters": ROPE},
    ),
    "exaone4 with windows": (
        "exaone4",
        {"sliding_window": 9, "num_hidden_layers": 5, "head_dim": 64, "rope_parameters": ROPE},
    ),
    "chatglm": ("chatglm", {"head_dim": 64}),
    "glm4": (
        "glm4",
        {"head_dim": 64, "attention_bias": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    ),
    "glm4, biased": ("glm4", {"head_dim": 32, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "granitemoe": (
        "granitemoe",
        {**GRANITE, "attention_multiplier": 0.05, "num_local_experts": 6, "shared_intermediate_size": 96},
    ),
    "granitemoe, nothing shared": ("granitemoe", {**GRANITE, "num_local_experts": 6, "shared_intermediate_size": 0}),
    "mistral3": (
        "mistral3",
        {
            "head_dim": 64,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "qwen2moe": (
        "qwen2moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "granite": ("granite", {**GRANITE, "attention_multiplier": 0.05}),
    "internlm2": ("internlm2", {}),
    "minicpm": ("minicpm", {**GRANITE, "attention_multiplier": 0.125}),
    "olmo2": ("olmo2", {"rope_parameters": ROPE}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "qwen2vl": ("qwen2vl", {}),
    "qwen3vl": ("qwen3vl", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3vlmoe": (
        "qwen3vlmoe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 32, "rope_parameters": ROPE}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True, "rope_parameters": ROPE}),
}
