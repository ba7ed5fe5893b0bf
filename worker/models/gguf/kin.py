"""Architectures of GGUFs that are one of our families but for a few facts, which their metadata does not say: llama.cpp
knows them (its src/models), and so does this page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from worker.models.architecture import Architecture, Rope
from worker.models.facts import beyond_float16

KIN = {
    "chatglm": "LlamaForCausalLM",
    "ernie4_5": "LlamaForCausalLM",
    "exaone": "LlamaForCausalLM",
    "exaone4": "Olmo2ForCausalLM",
    "gemma": "LlamaForCausalLM",
    "glm4": "LlamaForCausalLM",
    "granite": "LlamaForCausalLM",
    "internlm2": "LlamaForCausalLM",
    "minicpm": "LlamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "seed_oss": "LlamaForCausalLM",
    "smollm3": "LlamaForCausalLM",
}
"""Those of pictures are of text alone here, where each token has but one position."""
PARTLY_TURNING = ("chatglm", "glm4")
"""Those of which the first dimensions of each head turn, as many as the file says."""


def of_kin(name: str, architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """What the family makes of ``config``, as the architecture ``name`` has it."""
    change = _CHANGES.get(name)
    return architecture if change is None else change(architecture, config)


def _gemma(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """Gemma 1: Llama with another activation, and an embedding that is scaled."""
    scale, dtype = architecture.hidden_size**0.5, beyond_float16(architecture.dtype)
    return replace(architecture, activation="gelu_tanh", embedding_scale=scale, dtype=dtype)


def _chatglm(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """GLM-4: Llama that turns a part of each head."""
    return replace(architecture, ropes=(replace(architecture.ropes[0], rotary_dim=config["rotary_dim"]),))


def _glm4(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """GLM-4 of 2025, with norms behind attention and MLP as well."""
    return replace(
        _chatglm(architecture, config),
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )


def _mistral3(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """Ministral 3 multiplies queries by what grows with each context of pretraining behind the first, which is all that
    is served."""
    if not config["temperature_scale"]:
        return architecture
    reach = architecture.ropes[0].original_max_positions or architecture.max_positions
    return replace(architecture, max_positions=min(architecture.max_positions, reach))


def _granite(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """Llama with factors: of embedding, scores and logits, and of what each layer adds. A stream that is divided by the
    last has sums without it, and norms see no difference where what they add to its square is divided likewise."""
    scales = config["scales"]
    return replace(
        architecture,
        embedding_scale=scales["embedding"] / scales["residual"],
        norm_eps=architecture.norm_eps / scales["residual"] ** 2,
        attention_scale=scales["attention"] or architecture.attention_scale,
        head_scale=1.0 / scales["logit"],
    )


def _granitemoe(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """Its experts may have one beside them that every token goes through."""
    assert architecture.mixture is not None
    mixture = replace(architecture.mixture, shared_size=config["shared_size"])
    return _granite(replace(architecture, mixture=mixture), config)


def _qwen2moe(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """Qwen 2 with experts whose weights stay as they are, and one beside them that is weighed by itself."""
    assert architecture.mixture is not None
    mixture = replace(architecture.mixture, is_normed=False, shared_size=config["shared_size"], is_shared_weighed=True)
    return replace(architecture, mixture=mixture, qkv_bias=True)


def _smollm3(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """In every fourth layer nothing turns."""
    turns = [(layer + 1) % 4 != 0 for layer in range(architecture.num_layers)]
    return _turning(architecture, turns)


def _olmo2(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """OLMo 3 is that too, with windows in three of four layers; where these are, no rope is stretched."""
    slides = _slides(architecture, config)
    full = architecture.ropes[0]
    plain = Rope("default", full.theta, full.rotary_dim, full.max_positions)
    windows = tuple(config["sliding_window"] if each else 0 for each in slides)
    return replace(architecture, windows=windows, ropes=(full, plain), layer_ropes=tuple(map(int, slides)))


def _exaone4(architecture: Architecture, config: dict[str, Any]) -> Architecture:
    """OLMo 2 with norms of each head's queries and keys; where some layers have windows nothing turns in the others."""
    architecture = replace(architecture, qk_norm="head")
    slides = _slides(architecture, config)
    if not any(slides):
        return architecture
    windows = tuple(config["sliding_window"] if each else 0 for each in slides)
    return _turning(replace(architecture, windows=windows), slides)


def _slides(architecture: Architecture, config: dict[str, Any]) -> Sequence[bool]:
    """Whether each layer has a window: as the file says, else three of four, if there is one at all."""
    kinds = config.get("layer_types")
    if not config.get("sliding_window"):
        return [False] * architecture.num_layers
    if kinds is None:
        return [(layer + 1) % 4 != 0 for layer in range(architecture.num_layers)]
    return [kind == "sliding_attention" for kind in kinds]


def _turning(architecture: Architecture, turns: Sequence[bool]) -> Architecture:
    """In some of the layers alone: in the others all angles are 0."""
    own = architecture.ropes[0]
    still = Rope("proportional", own.theta, own.rotary_dim, own.max_positions, partial_factor=0.0)
    return replace(architecture, ropes=(own, still), layer_ropes=tuple(int(not each) for each in turns))


_CHANGES: dict[str, Callable[[Architecture, dict[str, Any]], Architecture]] = {
    "chatglm": _chatglm,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "glm4": _glm4,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "minicpm": _granite,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "qwen2moe": _qwen2moe,
    "smollm3": _smollm3,
}
