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
from worker.models import ops
from worker.models.architecture import Architecture
from worker.models.linear import Linear
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
    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Plan) -> Tensor:
        """token_ids and positions [num_tokens] i64, rows [num_logits] i64 -> the logits that follow those rows,
        [num_logits, vocab_size] f32.
        """
        architecture = self.architecture
        x = F.embedding(token_ids, self._embedding)
        if architecture.embedding_scale != 1.0:
            x = x * self._embedding_scale
        angles = [rotary.at(positions) for rotary in self._rotaries]
        last = architecture.num_layers - 1
        for index, layer in enumerate(self._layers):
            cos, sin = angles[architecture.layer_ropes[index]]
            mixed = self._attend(index, layer, x, cos, sin, plan)
            if index == last and len(rows) < len(x):
                # Past the last layer's keys and values only the rows that are asked for matter.
                x, mixed = x[rows], mixed[rows]
                if not len(rows):
                    return x.new_empty((0, architecture.vocab_size), dtype=torch.float32)
            x = x + self._normed(layer.output(mixed), layer.attention_post_norm)
            gated = ops.gate(layer.gate_up(self._normed(x, layer.mlp_pre_norm)), architecture.activation)
            x = x + self._normed(layer.down(gated), layer.mlp_post_norm)
        logits = self._head(ops.rms_norm(x, self._norm, architecture.norm_eps)).float()
        cap = architecture.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _attend(self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim]"""
        architecture = self.architecture
        num_heads, num_kv_heads, head_dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
        qkv = layer.qkv(self._normed(x, layer.attention_pre_norm))
        if architecture.qk_norm == "none":
            heads = qkv.view(len(x), -1, head_dim)
            turned = ops.rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
            return plan.attend(
                index, turned[:, :num_heads], turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]
            )
        keys_at, values_at = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        queries, keys, values = qkv[:, :keys_at], qkv[:, keys_at:values_at], qkv[:, values_at:]
        assert layer.query_norm is not None
        assert layer.key_norm is not None
        if architecture.qk_norm == "width":
            queries = ops.rms_norm(queries, layer.query_norm, architecture.norm_eps)
            keys = ops.rms_norm(keys, layer.key_norm, architecture.norm_eps)
        queries, keys, values = (part.reshape(len(x), -1, head_dim) for part in (queries, keys, values))
        if architecture.qk_norm == "head":
            queries = ops.rms_norm(queries, layer.query_norm, architecture.norm_eps)
            keys = ops.rms_norm(keys, layer.key_norm, architecture.norm_eps)
        return plan.attend(index, ops.rotate(queries, cos, sin), ops.rotate(keys, cos, sin), values)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else ops.rms_norm(x, weight, self.architecture.norm_eps)
