"""The transformer: one decoder for every family, configured by an Architecture.

Owns the computation between token ids and logits; where keys and values live and how they are read is the attention's
business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention import Plan
from worker.models.architecture import Architecture
from worker.models.linear import Linear
from worker.models.ops import Ops
from worker.models.rope import Rotary


@dataclass(slots=True)
class Layer:
    """One layer's weights; a norm that the family does not have is None. Norm weights are float32, Gemma's offset
    already added.
    """

    qkv: Linear
    """Rows: all query heads, all key heads, all value heads."""
    output: Linear
    gate_up: Linear
    down: Linear
    attention_pre_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_pre_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


class Decoder:
    """Token ids to logits."""

    def __init__(
        self,
        architecture: Architecture,
        embedding: Tensor,
        layers: list[Layer],
        norm: Tensor,
        head: Linear,
        max_model_tokens: int,
    ) -> None:
        self.architecture = architecture
        self.dtype, self.device = embedding.dtype, embedding.device
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._rotaries = [Rotary(rope, max_model_tokens, self.device) for rope in architecture.ropes]
        # transformers rounds Gemma's scale to the type of the activations; so do we, or bfloat16 logits would differ.
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale, dtype=self.dtype))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Plan, ops: Ops) -> Tensor:
        """The logits that follow ``rows``.

        token_ids and positions [num_tokens] i64, rows [num_logits] i64 -> [num_logits, vocab_size] f32.
        """
        architecture, eps = self.architecture, self.architecture.norm_eps
        x = F.embedding(token_ids, self._embedding)
        if architecture.embedding_scale != 1.0:
            x *= self._embedding_scale
        angles = [rotary.at(positions) for rotary in self._rotaries]
        last = architecture.num_layers - 1
        normed = ops.add_norm(x, None, None, self._layers[0].attention_pre_norm, eps)
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, normed, angles[architecture.layer_ropes[index]], plan, ops)
            if index == last and len(rows) < len(x):
                # Past the last layer's keys and values only the rows that are asked for matter.
                if not len(rows):
                    return x.new_empty((0, architecture.vocab_size), dtype=torch.float32)
                x, mixed = x[rows], mixed[rows]
            normed = ops.add_norm(x, layer.output(mixed), layer.attention_post_norm, layer.mlp_pre_norm, eps)
            gated = ops.gate(layer.gate_up(normed), architecture.activation)
            next_norm = self._norm if index == last else self._layers[index + 1].attention_pre_norm
            normed = ops.add_norm(x, layer.down(gated), layer.mlp_post_norm, next_norm, eps)
        logits = self._head.wide(normed)
        cap = architecture.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _attend(
        self, index: int, layer: Layer, normed: Tensor, angles: tuple[Tensor, Tensor], plan: Plan, ops: Ops
    ) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim]"""
        architecture = self.architecture
        qkv = layer.qkv(normed)
        ops.turn(qkv, architecture, *angles, layer.query_norm, layer.key_norm)
        heads = qkv.view(len(qkv), -1, architecture.head_dim)
        keys_at, values_at = architecture.num_heads, architecture.num_heads + architecture.num_kv_heads
        return plan.attend(index, heads[:, :keys_at], heads[:, keys_at:values_at], heads[:, values_at:])
