"""From a GGUF's metadata to an Architecture: put into the words of config.json, so that the families' own rules hold.

What the metadata leaves unsaid is what llama.cpp assumes (its src/llama-model.cpp), and what the converter folded into
the weights is taken out of the architecture: Gemma's norms have their offset already.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from policies.gguf import Array, GgufInvalid, Header, shown
from worker.models.architecture import Architecture
from worker.models.errors import ModelError
from worker.models.families import FAMILIES
from worker.models.fields import MAX_LAYERS, Fields
from worker.models.gguf.file import GgufFile
from worker.models.gguf.kin import KIN, PARTLY_TURNING, of_kin

_FAMILIES = {
    **KIN,
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MIXTURES = {
    "deepseek2": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granitemoe": "MixtralForCausalLM",
    "llama": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "MixtralForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
}
PERMUTED = frozenset(
    (
        *("chatglm", "ernie4_5", "glm4", "granite", "granitemoe", "internlm2", "llama", "minicpm", "mistral"),
        *("mistral3", "smollm3"),
    )
)
"""Architectures whose query and key rows are stored in pairs that turn together."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Tokens by which the served families end an answer: older files name but one of theirs."""
_GLM_ENDS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_OTHER_ENDS = {"gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"), "glm4": _GLM_ENDS, "chatglm": _GLM_ENDS}
"""Of gpt-oss, where <|end|> ends one message of several; and where who speaks next is what ends an answer."""
_CONTROL = 3
_SIGMOIDS = 2
"""What experts are scored by, of ``expert_gating_func``."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The one size of each that scales attention by the width of the model over its heads."""


def architecture_of_gguf(file: GgufFile) -> Architecture:
    """Raises ModelError, naming the architecture where it is not served."""
    try:
        return _Reader(file).architecture()
    except GgufInvalid as error:
        raise file.wrong(error) from None


class _Reader:
    def __init__(self, file: GgufFile) -> None:
        self._file, self._header = file, file.header
        self._name = self._header.text("general.architecture")
        if self._name not in _FAMILIES.keys() | _MIXTURES.keys():
            supported = ", ".join(sorted(_FAMILIES.keys() | _MIXTURES.keys()))
            raise ModelError(f"the GGUF architecture {shown(self._name)} is not supported; supported are {supported}")

    def architecture(self) -> Architecture:
        name, tensors = self._name, self._header.tensors
        num_experts = self._integer("expert_count", 0 if name in _FAMILIES else None)
        if num_experts and name not in _MIXTURES:
            supported = ", ".join(sorted(_MIXTURES))
            raise ModelError(
                f"{self._file.path} is a mixture of experts of the architecture {name}; mixtures of {supported} are"
                " supported"
            )
        config = self._config()
        family = _FAMILIES.get(name, "")
        if name == "deepseek2":
            family, config = self._deepseek(config, num_experts)
        elif num_experts or not family:
            family, config = _MIXTURES[name], config | self._mixture(config, num_experts)
        elif name == "llama" and config.get("sliding_window"):
            family = "MistralForCausalLM"
        architecture = FAMILIES[family](Fields(config, family, f"the metadata of {self._file.path.name}"))
        architecture = of_kin(name, architecture, config)
        if family in ("LlamaForCausalLM", "MistralForCausalLM"):
            return replace(
                architecture,
                qkv_bias=not tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
                output_bias="blk.0.attn_output.bias" in tensors,
                mlp_bias="blk.0.ffn_up.bias" in tensors,
            )
        if name == "deepseek2" and architecture.mixture is not None:
            # V3's configuration may say it, V2's cannot.
            return replace(architecture, mixture=replace(architecture.mixture, is_normed=config["norm_topk_prob"]))
        return replace(architecture, norm_offset=0.0)

    def _config(self) -> dict[str, Any]:
        name, tensors = self._name, self._header.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self._file.path} has no tensor token_embd.weight")
        num_layers = self._integer("block_count")
        if num_layers > MAX_LAYERS:
            raise self._header.wrong(f"{name}.block_count")
        hidden_size, num_heads = self._integer("embedding_length"), self._integer("attention.head_count")
        rotary_dim = self._integer("rope.dimension_count", 0)
        head_dim = self._integer("attention.key_length", hidden_size // max(num_heads, 1))
        is_latent = name == "deepseek2"
        if not is_latent and self._integer("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"the values of {self._file.path} are not as wide as its keys, which is not supported")
        config: dict[str, Any] = {
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length", self._integer("expert_feed_forward_length", 0)),
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "eos_token_id": self._ends(),
            "sliding_window": self._integer("attention.sliding_window", 0) or None,
            "dtype": "float16" if any(place.kind.name == "F16" for place in tensors.values()) else "bfloat16",
        }
        if name in PARTLY_TURNING and (rotary_dim > head_dim or rotary_dim % 2):
            raise ModelError(f"{self._file.path} turns {rotary_dim} of the {head_dim} dimensions of a head")
        if name in PARTLY_TURNING:
            config["rotary_dim"] = rotary_dim or head_dim
        elif name == "phi3":
            config["partial_rotary_factor"] = (rotary_dim or head_dim) / max(head_dim, 1)
        elif not is_latent and rotary_dim not in (0, head_dim):
            raise ModelError(
                f"{self._file.path} turns {rotary_dim} of the {head_dim} dimensions of a head, which is not supported"
            )
        if name in _GEMMA_27B_LAYERS:
            config |= self._gemma(config)
        if name in ("exaone4", "gpt-oss", "olmo2"):
            config |= self._layer_kinds(num_layers)
        if name in ("granite", "granitemoe", "minicpm"):
            config["scales"] = self._scales(config)
            config["shared_size"] = self._integer("expert_shared_feed_forward_length", 0)
        if name == "mistral3":
            config["temperature_scale"] = self._number("attention.temperature_scale", 0.0)
        scaling = self._rope_scaling(config)
        if scaling is None:
            return config
        original = scaling.get("original_max_position_embeddings")
        return config | {"rope_scaling": scaling, "original_max_position_embeddings": original}

    def _mixture(self, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        size, num_chosen = config["intermediate_size"], self._integer("expert_used_count")
        if self._name == "qwen2moe":
            config["shared_size"] = self._integer("expert_shared_feed_forward_length", size)
            size //= max(num_chosen, 1)
        size = self._integer("expert_feed_forward_length", size)
        return {
            "num_local_experts": num_experts,
            "num_experts": num_experts,
            "num_experts_per_tok": num_chosen,
            "intermediate_size": size,
            "moe_intermediate_size": size,
            "norm_topk_prob": self._name != "olmoe",
        }

    def _deepseek(self, config: dict[str, Any], num_experts: int) -> tuple[str, dict[str, Any]]:
        """And the family: V3's experts are scored by sigmoids."""
        if self._number("attention.temperature_scale", 0.0):
            raise ModelError(f"{self._file.path} scales attention by the position, which is not supported")
        # Since April 2025 the plain ones are those of what is kept of a token.
        lengths = "_mla" if self._has("attention.key_length_mla") else ""
        rope_dim, num_extra = self._integer("rope.dimension_count"), self._integer("nextn_predict_layers", 0)
        num_groups = self._integer("expert_group_count", 1)
        is_third = self._integer("expert_gating_func", 0) == _SIGMOIDS
        return "DeepseekV3ForCausalLM" if is_third else _MIXTURES[self._name], config | {
            "num_hidden_layers": config["num_hidden_layers"] - num_extra,
            "num_nextn_predict_layers": num_extra,
            "num_key_value_heads": config["num_attention_heads"],
            "qk_rope_head_dim": rope_dim,
            "qk_nope_head_dim": self._integer(f"attention.key_length{lengths}") - rope_dim,
            "v_head_dim": self._integer(f"attention.value_length{lengths}"),
            "q_lora_rank": self._integer("attention.q_lora_rank", 0),
            "kv_lora_rank": self._integer("attention.kv_lora_rank"),
            "n_routed_experts": num_experts,
            "num_experts_per_tok": self._integer("expert_used_count"),
            "moe_intermediate_size": self._integer("expert_feed_forward_length"),
            "n_shared_experts": self._integer("expert_shared_count", 0),
            "first_k_dense_replace": self._integer("leading_dense_block_count", 0),
            "routed_scaling_factor": self._number("expert_weights_scale", 1.0) or 1.0,
            "norm_topk_prob": self._header.flag(f"{self._name}.expert_weights_norm", False),
            "n_group": num_groups,
            "topk_group": self._integer("expert_group_used_count", num_groups),
            "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
        }

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[self._name]
        scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        softcaps = (50.0, 30.0) if self._name == "gemma2" else (0.0, 0.0)
        return {
            **self._layer_kinds(config["num_hidden_layers"]),
            "query_pre_attn_scalar": scale,
            "attn_logit_softcapping": self._number("attn_logit_softcapping", softcaps[0]),
            "final_logit_softcapping": self._number("final_logit_softcapping", softcaps[1]),
            "rope_theta": config["rope_theta"] if self._has("rope.freq_base") else None,
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10_000.0),
        }

    def _scales(self, config: dict[str, Any]) -> dict[str, float]:
        """Factors by which a file changes what Llama has; those of attention are 0 where they are its own."""
        of_minicpm = 12.0, 1.4 / math.sqrt(max(config["num_hidden_layers"], 1)), config["hidden_size"] / 256
        defaults = of_minicpm if self._name == "minicpm" else (1.0, 1.0, None)
        scales = {
            "embedding": self._number("embedding_scale", defaults[0]),
            "residual": self._number("residual_scale", defaults[1]),
            "logit": self._number("logit_scale", defaults[2]),
            "attention": self._number("attention.scale", 0.0),
        }
        if not self._header.flag(f"{self._name}.rope.scaling.finetuned", True):
            raise ModelError(f"{self._file.path} turns nothing by its position, which is not supported")
        for name, scale in scales.items():
            if scale < 0 or (scale == 0 and name != "attention"):
                raise ModelError(f"{self._file.path} has an impossible {name} scale: {scale}")
        return scales

    def _layer_kinds(self, num_layers: int) -> dict[str, Any]:
        """Which layers slide, where the file says so: every nth does not, or a flag for each."""
        key = f"{self._name}.attention.sliding_window_pattern"
        if isinstance(self._header.metadata.get(key), Array):
            slides = list(map(bool, self._header.numbers(key)))
            if len(slides) != num_layers:
                raise self._header.wrong(key)
        elif self._has("attention.sliding_window_pattern"):
            period = self._header.integer(key)
            slides = [period == 0 or (layer + 1) % period != 0 for layer in range(num_layers)]
        else:
            return {}
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """In the words of config.json's rope_scaling."""
        if "rope_factors_long.weight" in self._header.tensors:
            return {
                "rope_type": "longrope",
                "short_factor": self._factors("rope_factors_short.weight"),
                "long_factor": self._factors("rope_factors_long.weight"),
                "original_max_position_embeddings": self._integer("rope.scaling.original_context_length"),
                "attention_factor": self._number("rope.scaling.attn_factor", 1.0),
            }
        if "rope_freqs.weight" in self._header.tensors:
            # Llama 3.1's ramp, worked out by the converter: each angle has its own divisor, whatever the length.
            factors = self._factors("rope_freqs.weight")
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "original_max_position_embeddings": config["max_position_embeddings"],
                "factor": 1.0,
                "attention_factor": 1.0,
            }
        kind = self._header.text(f"{self._name}.rope.scaling.type", "none")
        if kind == "none" and not self._has("rope.scale_linear"):
            return None
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        if kind == "longrope":
            return None  # without factors there is nothing to stretch by
        if kind != "yarn":
            raise ModelError(f"the RoPE scaling {shown(kind)} of {self._file.path} is not supported")
        temperature = self._number("rope.scaling.attn_factor", 1.0)
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length"),
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": self._name != "gpt-oss",
        }
        if self._name == "deepseek2" and self._has("rope.scaling.yarn_log_multiplier"):
            # A tenth of mscale_all_dim, which mscale equals in all that are published.
            scaling["mscale"] = scaling["mscale_all_dim"] = 10 * self._number("rope.scaling.yarn_log_multiplier")
        elif self._name == "mistral3" and self._number("rope.scaling.yarn_log_multiplier", 0.0):
            scaling |= {"mscale": 1.0, "mscale_all_dim": self._number("rope.scaling.yarn_log_multiplier")}
        elif temperature != 1.0:
            scaling["attention_factor"] = temperature * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return scaling

    def _factors(self, name: str) -> list[float]:
        place = self._header.tensors.get(name)
        if place is None:
            raise ModelError(f"{self._file.path} has no tensor {name}")
        if place.kind.name != "F32" or len(place.shape) != 1:
            raise ModelError(f"tensor {name} of {self._file.path} is not a row of F32")
        factors: list[float] = self._file.raw(place).view(torch.float32)[0].tolist()
        if not all(0 < factor < float("inf") for factor in factors):
            raise ModelError(f"tensor {name} of {self._file.path} holds an impossible factor")
        return factors

    def _ends(self) -> list[int]:
        header: Header = self._header
        ends = [
            header.integer(f"tokenizer.ggml.{name}_token_id")
            for name in ("eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in header.metadata
        ]
        if "tokenizer.ggml.tokens" in header.metadata and "tokenizer.ggml.token_type" in header.metadata:
            kinds = header.numbers("tokenizer.ggml.token_type")
            known = _OTHER_ENDS.get(self._name, _ENDS)
            for token_id, (token, kind) in enumerate(zip(header.texts("tokenizer.ggml.tokens"), kinds, strict=False)):
                if kind == _CONTROL and token in known:
                    ends.append(token_id)
        return list(dict.fromkeys(ends))

    def _has(self, key: str) -> bool:
        return f"{self._name}.{key}" in self._header.metadata

    def _integer(self, key: str, default: int | None = None) -> int:
        key = f"{self._name}.{key}"
        if not isinstance(self._header.metadata.get(key), Array):
            return self._header.integer(key, default)
        of_layers = set(self._header.numbers(key))
        if len(of_layers) != 1:
            raise ModelError(f"the layers of {self._file.path} differ in their {key}, which is not supported")
        value = of_layers.pop()
        if not 0 <= value < 1 << 31 or value != int(value):
            raise ModelError(f"the layers of {self._file.path} have an impossible {key}: {value}")
        return int(value)

    def _number(self, key: str, default: float | None = None) -> float:
        return self._header.number(f"{self._name}.{key}", default)
