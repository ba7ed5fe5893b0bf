"""The loop that a compiled model runs at one sequence: a static cache, one graph a token, nothing else.

What gpt-fast (PyTorch's blog "Accelerating Generative AI with PyTorch II", 2023) showed to be near the limit at batch
1, written here anew in its smallest form: it has no scheduler, no pages and no second sequence, so an engine is as good
as it gets when it is level with this.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.models import Architecture
from worker.models.rope import Rotary


class _Layer(nn.Module):
    """Buffers, which a recorded graph finds where they lie and may change; of a mixture, the two matrices behind
    attention are those of all experts."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None
    keys: Tensor
    """[1, num_kv_heads, max_tokens, head_dim], as values."""
    values: Tensor

    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class _Step(nn.Module):
    """A token after the other; norms weigh nothing."""

    embedding: Tensor
    head: Tensor
    places: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, architecture: Architecture, device: torch.device, max_tokens: int) -> None:
        super().__init__()
        self._architecture = each = architecture
        size, inner, kv_width = each.hidden_size, each.intermediate_size, each.num_kv_heads * each.head_dim
        width = each.num_heads * each.head_dim

        def matrix(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

        num_experts = () if each.mixture is None else (each.mixture.num_experts,)

        def cache() -> Tensor:
            shape = (1, each.num_kv_heads, max_tokens, each.head_dim)
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        self.register_buffer("embedding", matrix(each.vocab_size, size))
        self.layers = nn.ModuleList(
            _Layer(
                qkv=matrix(width + 2 * kv_width, size),
                output=matrix(size, width),
                gate_up=matrix(*num_experts, 2 * inner, size),
                down=matrix(*num_experts, size, inner),
                router=matrix(*num_experts, size) if num_experts else None,
                keys=cache(),
                values=cache(),
            )
            for _ in range(each.num_layers)
        )
        self.register_buffer("head", matrix(each.vocab_size, size))
        self.register_buffer("places", torch.arange(max_tokens, device=device))
        cos, sin = Rotary(each.ropes[0], max_tokens, device).at(self.places)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, token_id: Tensor, position: Tensor) -> Tensor:
        """[1] i64 and [1] i64 -> [1] i64."""
        each = self._architecture
        x = F.embedding(token_id, self.embedding)
        seen = (self.places <= position)[None, None, None]
        cos, sin = self.cos[position], self.sin[position]
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            heads = F.linear(self._norm(x), layer.qkv).view(1, -1, each.head_dim)
            queries, keys, values = heads.split([each.num_heads, each.num_kv_heads, each.num_kv_heads], dim=1)
            layer.keys.index_copy_(2, position, _turned(keys, cos, sin)[None].transpose(1, 2))
            layer.values.index_copy_(2, position, values[None].transpose(1, 2))
            attended = F.scaled_dot_product_attention(
                _turned(queries, cos, sin)[None].transpose(1, 2),
                layer.keys,
                layer.values,
                attn_mask=seen,
                enable_gqa=True,
            )
            x = x + F.linear(attended.reshape(1, -1), layer.output)
            x = x + self._feed(layer, self._norm(x))
        return F.linear(self._norm(x), self.head).argmax(-1)

    def _feed(self, layer: _Layer, x: Tensor) -> Tensor:
        """[1, hidden_size] -> the same."""
        mixture = self._architecture.mixture
        if layer.router is None or mixture is None:
            gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, layer.down)
        # As gpt-fast's Mixtral: the matrices of those chosen are gathered, which a compiler fuses with the products.
        weights, chosen = F.linear(x, layer.router)[0].float().softmax(-1).topk(mixture.num_chosen)
        if mixture.is_normed:
            weights = weights / weights.sum()
        gate, up = torch.einsum("eoi,i->eo", layer.gate_up[chosen], x[0]).chunk(2, dim=-1)
        outs = torch.einsum("eoi,ei->eo", layer.down[chosen], F.silu(gate) * up)
        return (outs * weights[:, None]).sum(0, keepdim=True).to(x.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self._architecture.norm_eps)


class CompiledLoop:
    """Random weights of a shape."""

    def __init__(self, architecture: Architecture, device: torch.device, max_tokens: int, compiles: bool) -> None:
        self._device = device
        step = _Step(architecture, device, max_tokens)
        self._decode: Callable[[Tensor, Tensor], Tensor] = step
        if compiles:
            torch._inductor.config.coordinate_descent_tuning = True
            self._decode = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def decode_s(self, num_prompt_tokens: int, num_tokens: int) -> float:
        """Seconds for so many tokens behind a prompt; the prompt's keys and values are zeros, which cost the same."""
        token_id = torch.zeros(1, dtype=torch.int64, device=self._device)
        positions = torch.arange(num_prompt_tokens, num_prompt_tokens + num_tokens, device=self._device)
        for position in positions[:3]:
            # Compiled, then captured, then replayed.
            token_id = self._decode(token_id, position[None]).clone()
        _finish(self._device)
        began_at = perf_counter()
        for position in positions:
            token_id = self._decode(token_id, position[None]).clone()
        _finish(self._device)
        return perf_counter() - began_at


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [1, num_heads, head_dim], cos and sin [1, head_dim] as Rotary gives them."""
    wide = heads.float()
    rolled = wide.roll(wide.shape[-1] // 2, -1)
    return (wide * cos[:, None] + rolled * sin[:, None]).to(heads.dtype)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
