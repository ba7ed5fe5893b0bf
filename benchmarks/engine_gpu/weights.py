"""Random weights made where they are used, for our engine, for transformers and for the compiled loop."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor

from policies.settings import Quantization
from worker.models import SHAPES, Architecture, Decoder
from worker.models.architecture import Mixture, Rope
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource

_ROPE = Rope(
    kind="llama3",
    theta=500_000.0,
    rotary_dim=128,
    max_positions=131_072,
    factor=8.0,
    original_max_positions=8192,
)
SHAPE_8B = dataclasses.replace(
    SHAPES["S"],
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    norm_eps=1e-5,
    attention_scale=128**-0.5,
    ropes=(_ROPE,),
    layer_ropes=(0,) * 32,
    windows=(0,) * 32,
    tied=False,
)
"""Llama-3.1-8B's, from its config.json."""
SHAPE_30B = dataclasses.replace(
    SHAPE_8B,
    name="Qwen3MoeForCausalLM",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=768,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    max_positions=40_960,
    norm_eps=1e-6,
    ropes=(Rope(theta=1_000_000.0, rotary_dim=128, max_positions=40_960),),
    layer_ropes=(0,) * 48,
    windows=(0,) * 48,
    qk_norm="head",
    mixture=Mixture(128, 8, True),
)
"""Qwen3-30B-A3B's, from its config.json: a mixture of which a token reads 3 thousand million weights."""
TINY = dataclasses.replace(
    SHAPE_8B,
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
    attention_scale=0.25,
    ropes=(Rope(rotary_dim=16, max_positions=1024),),
    layer_ropes=(0, 0),
    windows=(0, 0),
)
TINY_MIXTURE = dataclasses.replace(
    TINY, name=SHAPE_30B.name, intermediate_size=32, qk_norm="head", mixture=Mixture(8, 2, True)
)
ARCHITECTURES: dict[str, Architecture] = {
    "8b": SHAPE_8B,
    "30b-a3b": SHAPE_30B,
    "tiny": TINY,
    "tiny-mixture": TINY_MIXTURE,
}


def num_matrix_weights(architecture: Architecture) -> int:
    """In all matrices that a step of one token reads; the embedding is looked up, not read."""
    each, mixture = architecture, architecture.mixture
    heads = (2 * each.num_heads + 2 * each.num_kv_heads) * each.head_dim
    num_inner = 3 * each.intermediate_size
    if mixture is not None:
        num_inner = mixture.num_experts + mixture.num_chosen * num_inner
    layer = each.hidden_size * (heads + num_inner)
    return each.num_layers * layer + each.vocab_size * each.hidden_size


def decoder(architecture: Architecture, device: torch.device, quantization: Quantization) -> Decoder:
    """Ours, of bfloat16, quantised as asked. Raises ModelError.

    A layer adds little to what it is given, as in a trained model, for embeddings are large beside the matrices. Else,
    where there are experts, a row that is rounded otherwise goes through others in the next layer, and in the last one
    says something else, for which a graph would be taken for wrong (``worker.graphs.FARTHEST``).
    """
    generator = torch.Generator(device).manual_seed(0)

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight"):
            return tensor
        return tensor.normal_(0.0, 1.0 if name == "embed_tokens.weight" else 0.02, generator=generator)

    return build_decoder(
        Shard.of(architecture),
        PlainSource(take),
        torch.bfloat16,
        device,
        architecture.max_positions,
        quantization=quantization,
    )


def transformers_model(architecture: Architecture, device: torch.device) -> Any:
    """transformers' model of the same sizes. Raises ImportError."""
    transformers: Any = importlib.import_module("transformers")
    rope = architecture.ropes[0]
    stretched = {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    mixture = architecture.mixture
    kind, experts = transformers.LlamaConfig, {}
    if mixture is not None:
        kind = transformers.Qwen3MoeConfig
        experts = {
            "num_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.num_chosen,
            "norm_topk_prob": mixture.is_normed,
            "moe_intermediate_size": architecture.intermediate_size,
        }
    config = kind(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_positions,
        rms_norm_eps=architecture.norm_eps,
        rope_parameters=stretched if rope.kind == "llama3" else {"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=architecture.tied,
        dtype=torch.bfloat16,
        **experts,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()
