"""A model of transformers that computes steps of ours: tokens of many sequences end to end, KV in our pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.attention import Plan
from worker.attention.grouped import LayerKind
from worker.attention.kept import KeptPlan
from worker.models.foreign.manners import InTurn, Manner


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rest of the worker wants to know of it."""

    name: str
    """As config.json says: "BloomForCausalLM"."""
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own, as config.json says."""


class Foreign:
    """Token ids to logits, as Decoder."""

    def __init__(
        self,
        model: Any,
        facts: Facts,
        dtype: torch.dtype,
        device: torch.device,
        manner: Manner,
        kinds: Sequence[LayerKind],
    ) -> None:
        """``model`` is set to the attention of this manner, which has found these kinds of layers."""
        self.architecture, self.dtype, self.device = facts, dtype, device
        self.model, self.manner, self.kinds = model, manner, kinds

    @property
    def windows(self) -> tuple[int, ...]:
        """Of all layers: the tokens, its own among them, that a token looks back on at most; 0: all."""
        return tuple(abs(kind.window) for kind in self.kinds)

    @property
    def attends_itself(self) -> bool:
        """Its plans are of a Kept, rather than of a GroupedAttention; both over ``kinds``."""
        return isinstance(self.manner, InTurn)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Plan | KeptPlan) -> Tensor:
        """As Decoder.forward."""
        return self.manner.compute(self.model, token_ids, positions, rows, plan)
