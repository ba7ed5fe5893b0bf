"""A named shape with random weights as a Hugging Face checkpoint, so that the engine and a peer read the same files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.models import SHAPES, Architecture, ModelError
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource


def write(shape: str, directory: Path, seed: int = 0) -> None:
    """config.json and model.safetensors in bfloat16; the weights are a function of the seed. Raises ModelError."""
    if shape not in SHAPES:
        raise ModelError(f"there is no shape {shape}; there are {', '.join(SHAPES)}")
    architecture = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            tensor = torch.ones(size, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = tensor
        return tensor

    # The decoder is built for the names and sizes that it asks for, and dropped.
    cpu = torch.device("cpu")
    build_decoder(Shard.of(architecture), PlainSource(take), torch.bfloat16, cpu, architecture.max_positions)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(architecture), indent=2))


def _config(architecture: Architecture) -> dict[str, object]:
    return {
        "architectures": [architecture.name],
        "model_type": architecture.name.removesuffix("ForCausalLM").lower(),
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": architecture.max_positions,
        "rms_norm_eps": architecture.norm_eps,
        "rope_theta": architecture.ropes[0].theta,
        "tie_word_embeddings": architecture.tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
