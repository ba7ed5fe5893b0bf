"""Tiny random checkpoints, written by transformers as it writes any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def checkpoint(
    directory: Path, architecture: str, seed: int = 0, shard_bytes: int | None = None, **changes: Any
) -> Any:
    """A random float32 model of this architecture, saved to ``directory``; ``changes`` are fields of its configuration.

    Weights are larger than an untrained model's, so that attention is far from uniform and greedy tokens are far from
    ties.
    """
    torch.manual_seed(seed)
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
    size = {"max_shard_size": shard_bytes} if shard_bytes else {}
    model.save_pretrained(directory, **size)
    return model


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    return model(torch.tensor([token_ids])).logits[0].float()
