"""Multi-head latent attention (DeepSeek-V2, DeepSeek-AI 2024, section 2.1): a token leaves one vector for all heads.

Each head has a matrix that makes its keys of that latent, and one that makes its values. The first is multiplied with
the queries and the second with what attention gives, so that attention itself is that of one KV head, which is its own
value: what turns of the key, and behind it the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention import Plan
from worker.models.additions import Additions
from worker.models.architecture import Architecture, Latent
from worker.models.linear import Linear
from worker.models.ops import Ops, Turning

NORM_EPS = 1e-6
"""Of the norms in here, whatever the others have."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Of one layer; norm weights are float32."""

    facts: Latent
    queries: Linear
    """Rows: of each head what does not turn, and what does."""
    compressed: Linear
    """Rows: the latent, and what turns of the key."""
    norm: Tensor
    """Of the latent."""
    keys: Linear
    """Of each head, key_dim -> rank."""
    values: Linear
    """Of each head, rank -> value_dim."""
    compressed_queries: Linear | None
    query_norm: Tensor | None

    def __call__(
        self,
        x: Tensor,
        plan: Plan,
        layer: int,
        ops: Ops,
        architecture: Architecture,
        angles: Turning,
        additions: Additions | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * value_dim]"""
        facts, num_heads = self.facts, architecture.num_heads
        own, turning = torch.split(self._queries(x, layer, ops, additions), [facts.key_dim, facts.rope_dim], 2)
        compressed = self.compressed(x)
        if additions is not None:
            additions.add(layer, "compressed", x, compressed)
        latent, turning_key = torch.split(compressed, [facts.rank, facts.rope_dim], 1)
        heads = x.new_empty((len(x), num_heads + 2, architecture.head_dim))
        queries, key, value = heads[:, :num_heads], heads[:, num_heads:-1], heads[:, -1:]
        queries[..., : facts.rope_dim] = self._in_halves(turning)
        own = own.flatten(1)
        as_latent = self.keys(own)
        if additions is not None:
            additions.add(layer, "keys", own, as_latent)
        queries[..., facts.rope_dim :] = as_latent.view(len(x), num_heads, -1)
        key[:, 0, : facts.rope_dim] = self._in_halves(turning_key)
        key[:, 0, facts.rope_dim :] = ops.add_norm(latent.contiguous(), None, None, self.norm, NORM_EPS)
        ops.turn(heads.view(len(x), -1), architecture, angles)
        value.copy_(key)
        mixed = plan.attend(layer, queries, key, value).view(len(x), num_heads, -1)[..., facts.rope_dim :].flatten(1)
        values = self.values(mixed)
        if additions is not None:
            additions.add(layer, "values", mixed, values)
        return values

    def _queries(self, x: Tensor, layer: int, ops: Ops, additions: Additions | None) -> Tensor:
        """[num_tokens, num_heads, key_dim + rope_dim]"""
        if self.compressed_queries is not None:
            compressed = self.compressed_queries(x)
            if additions is not None:
                additions.add(layer, "compressed_queries", x, compressed)
            x = ops.add_norm(compressed, None, None, self.query_norm, NORM_EPS)
        queries = self.queries(x)
        if additions is not None:
            additions.add(layer, "queries", x, queries)
        return queries.view(len(x), -1, self.facts.key_dim + self.facts.rope_dim)

    def _in_halves(self, turning: Tensor) -> Tensor:
        """[..., rope_dim], so that the two that turn together are half of it apart."""
        if not self.facts.is_interleaved:
            return turning
        return torch.cat((turning[..., 0::2], turning[..., 1::2]), -1)
