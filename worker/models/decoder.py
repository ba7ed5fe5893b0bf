"""The transformer: one decoder for every family, configured by an Architecture.

Owns the computation between token ids and logits, or the part of it that one of several ranks has; where keys and
values live and how they are read is the attention's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention import Plan
from worker.models.additions import Additions
from worker.models.experts import Experts
from worker.models.latent import LatentAttention
from worker.models.linear import Linear
from worker.models.link import Alone, Link
from worker.models.mlp import feed
from worker.models.ops import Ops, Turning, softcapped
from worker.models.rope import Rotary
from worker.models.shard import Shard


@dataclass(slots=True)
class Layer:
    """One layer's weights; a norm that the family does not have is None. Norm weights are float32, Gemma's offset
    already added.
    """

    qkv: Linear | None
    """Rows: all query heads, all key heads, all value heads."""
    output: Linear
    gate_up: Linear | None
    down: Linear | None
    experts: Experts | None = None
    """In place of the two before."""
    latent: LatentAttention | None = None
    """In place of ``qkv``."""
    attention_pre_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_pre_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None
    """[num_heads] f32, see Scores."""


class Decoder:
    """Token ids to logits; of several ranks, each its own layers and its own heads of them."""

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        embedding: Tensor | None,
        layers: list[Layer],
        norm: Tensor | None,
        head: Linear | None,
        max_model_tokens: int,
    ) -> None:
        """``embedding`` where the shard is of the first stage, ``norm`` and ``head`` where it is of the last."""
        self.shard, self.architecture = shard, shard.own
        self.dtype, self.device = dtype, device
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self.rotaries = [Rotary(rope, max_model_tokens, self.device) for rope in shard.own.ropes]
        # transformers rounds Gemma's scale to the type of the activations; so do we, or bfloat16 logits would differ.
        self.embedding_scale = float(torch.tensor(shard.own.embedding_scale, dtype=dtype))
        self._norms_apart = shard.own.qk_norm == "width" and shard.layout.tensor > 1
        self._link: Link = Alone()
        self.keeps_hidden = False
        self.hidden: Tensor | None = None
        """[num_logits, hidden_size]: what the head was given in the last ``forward``, where that is kept."""
        self.pooled: Tensor | None = None
        """[num_hidden, hidden_size]: as ``hidden``, of the rows that were wanted for vectors."""
        self.taps: tuple[int, ...] = ()
        """Layers of which what goes in is kept, too."""
        self.tapped: list[Tensor] = []
        """Of each [num_tokens, hidden_size], in the last ``forward``."""

    @property
    def windows(self) -> tuple[int, ...]:
        """As in Scores, of all layers of all ranks."""
        return self.shard.whole.windows

    def join(self, link: Link) -> None:
        """Compute with other ranks from now on."""
        self._link = link

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        plan: Plan,
        ops: Ops,
        additions: Additions | None = None,
        num_hidden: int = 0,
    ) -> Tensor:
        """The logits that follow ``rows``.

        token_ids and positions [num_tokens] i64, rows [num_logits + num_hidden] i64 -> [num_logits, vocab_size] f32;
        [0, vocab_size] on a rank that is not the first of the last stage. ``num_hidden``: of the last so many rows only
        what the head would be given is wanted, and is left in ``pooled``.
        """
        architecture, eps, link = self.architecture, self.architecture.norm_eps, self._link
        x = self.enter(token_ids)
        angles = [rotary.at(positions) for rotary in self.rotaries]
        last = architecture.num_layers - 1
        self.tapped = []
        normed = ops.add_norm(x, None, None, self.layers[0].attention_pre_norm, eps)
        for index, layer in enumerate(self.layers):
            if index in self.taps:
                self.tapped.append(x.clone())
            mixed = self._attend(index, layer, normed, angles[architecture.layer_ropes[index]], plan, ops, additions)
            if index == last and self.shard.is_last and (len(rows) < len(x) or num_hidden):
                # Past the last layer's keys and values only the rows that are asked for matter, in their order.
                if not len(rows):
                    break
                additions = additions.wanted(rows, len(x)) if additions is not None else None
                x, mixed = x[rows], mixed[rows]
            output = layer.output(mixed)
            if additions is not None:
                additions.add(index, "output", mixed, output)
            output = link.sum(output)
            normed = ops.add_norm(x, output, layer.attention_post_norm, layer.mlp_pre_norm, eps)
            down = self._feed(index, layer, normed, ops, additions)
            next_norm = self.norm if index == last else self.layers[index + 1].attention_pre_norm
            normed = ops.add_norm(x, link.sum(down), layer.mlp_post_norm, next_norm, eps)
        if self.head is None:
            link.send(x)
        if self.head is None or not len(rows):
            return x.new_empty((0, architecture.vocab_size), dtype=torch.float32)
        if num_hidden:
            normed, self.pooled = normed[: len(rows) - num_hidden], normed[len(rows) - num_hidden :]
        if self.keeps_hidden:
            self.hidden = normed
        return link.gather(self.logits_of(normed), self.shard.vocabulary_widths)

    def logits_of(self, normed: Tensor) -> Tensor:
        """Of what the head is given, [num_rows, hidden_size] -> this rank's part, f32."""
        assert self.head is not None
        return softcapped(self.head.wide(normed), self.architecture.logits_softcap)

    def _feed(self, index: int, layer: Layer, normed: Tensor, ops: Ops, additions: Additions | None) -> Tensor:
        """[num_tokens, hidden_size] -> the same: the MLP, or the experts."""
        activation = self.architecture.activation
        if layer.experts is not None:
            return layer.experts(normed, ops, activation, index, additions)
        assert layer.gate_up is not None
        assert layer.down is not None
        return feed(normed, layer.gate_up, layer.down, ops, activation, index, additions)

    @torch.inference_mode()
    def keep_up(self, num_tokens: int, num_logits: int, num_done: int) -> None:
        """In place of a ``forward`` that failed here, for the ranks that wait for this one: the calls of its link but
        for the first ``num_done``, with zeros."""
        for call in islice(self._calls(num_tokens, num_logits), num_done, None):
            call()

    def _calls(self, num_tokens: int, num_logits: int) -> Iterator[Callable[[], object]]:
        """What ``forward`` says to its link."""
        architecture, link, shard = self.architecture, self._link, self.shard

        def sum_of(num_rows: int, size: int, dtype: torch.dtype) -> Callable[[], object]:
            return lambda: link.sum(torch.zeros((num_rows, size), dtype=dtype, device=self.device))

        size = architecture.hidden_size
        if not shard.is_first:
            yield lambda: link.receive((num_tokens, size), self.dtype, self.device)
        elif len(shard.vocabulary) < architecture.vocab_size:
            yield sum_of(num_tokens, size, self.dtype)
        num_rows = num_tokens
        for index in range(architecture.num_layers):
            if self._norms_apart:
                yield sum_of(2, num_tokens, torch.float32)
            if shard.is_last and index == architecture.num_layers - 1:
                num_rows = num_logits
                if not num_rows:
                    return
            yield from 2 * [sum_of(num_rows, size, self.dtype)]
        if self.head is None:
            yield lambda: link.send(torch.zeros((num_tokens, size), dtype=self.dtype, device=self.device))
        else:
            widths = shard.vocabulary_widths
            own = torch.zeros((num_rows, len(shard.vocabulary)), device=self.device)
            yield lambda: link.gather(own, widths)

    def enter(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], by embedding or from the stage before."""
        if not self.shard.is_first or self.embedding is None:
            return self._link.receive((len(token_ids), self.architecture.hidden_size), self.dtype, self.device)
        vocabulary = self.shard.vocabulary
        if len(vocabulary) == self.architecture.vocab_size:
            x = F.embedding(token_ids, self.embedding)
        else:
            own = token_ids - vocabulary.start
            elsewhere = (own < 0) | (own >= len(vocabulary))
            x = F.embedding(own.masked_fill_(elsewhere, 0), self.embedding).masked_fill_(elsewhere[:, None], 0.0)
            x = self._link.sum(x)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        return x

    def _attend(
        self,
        index: int,
        layer: Layer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        plan: Plan,
        ops: Ops,
        additions: Additions | None,
    ) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim], or as wide as values are"""
        if layer.latent is not None:
            return layer.latent(normed, plan, index, ops, self.architecture, Turning(*angles), additions)
        assert layer.qkv is not None
        qkv = layer.qkv(normed)
        if additions is not None:
            additions.add(index, "qkv", normed, qkv)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if self._norms_apart and query_norm is not None and key_norm is not None:
            self._norm_with_others(qkv, query_norm, key_norm)
            query_norm = key_norm = None
        return ops.attend(plan, index, qkv, self.architecture, Turning(*angles, query_norm, key_norm))

    def _norm_with_others(self, qkv: Tensor, query_norm: Tensor, key_norm: Tensor) -> None:
        """RMSNorm of queries and keys over the heads of all ranks, in place: the squares are summed among them."""
        shard = self.shard
        keys_at = len(query_norm)
        queries, keys = qkv[:, :keys_at], qkv[:, keys_at : keys_at + len(key_norm)]
        squares = torch.stack((queries.float().square().sum(1), keys.float().square().sum(1)))
        self._link.sum(squares)
        # A KV head that several ranks have is in the sum as often.
        counts = (shard.whole.num_heads, shard.whole.num_kv_heads * shard.num_kv_copies)
        for part, weight, square, count in zip((queries, keys), (query_norm, key_norm), squares, counts, strict=True):
            scale = (square / (count * shard.whole.head_dim) + shard.whole.norm_eps).rsqrt()
            part.copy_(part.float() * scale[:, None] * weight)
