"""Models of a named shape with random weights: for measuring an engine where no checkpoint is."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.architecture import Architecture, Rope
from worker.models.decoder import Decoder
from worker.models.errors import ModelError
from worker.models.linear import Means
from worker.models.load import build_decoder
from worker.models.shard import Shard
from worker.models.sources import PlainSource


def _shape(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, bias: bool
) -> Architecture:
    head_dim = hidden // heads
    return Architecture(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=32_768,
        norm_eps=1e-6,
        attention_scale=head_dim**-0.5,
        ropes=(Rope(rotary_dim=head_dim, max_positions=32_768),),
        layer_ropes=(0,) * layers,
        windows=(0,) * layers,
        tied=True,
        qkv_bias=bias,
    )


SHAPES: dict[str, Architecture] = {
    "S": _shape("LlamaForCausalLM", 8, 384, 1024, 6, 2, 32_000, bias=False),
    "M": _shape("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 151_936, bias=True),
}
"""S: 25 M parameters. M: Qwen2.5-0.5B's, 494 M."""


def random_decoder(shape: str, dtype: torch.dtype, device: torch.device, means: Means) -> Decoder:
    """A decoder of one of SHAPES, its random weights always the same. Raises ModelError."""
    if shape not in SHAPES:
        raise ModelError(f"there is no shape {shape}; there are {', '.join(SHAPES)}")
    generator = torch.Generator().manual_seed(0)

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype).normal_(0.0, 0.02, generator=generator).to(device)

    architecture = SHAPES[shape]
    return build_decoder(Shard.of(architecture), PlainSource(take), dtype, device, architecture.max_positions, means)
