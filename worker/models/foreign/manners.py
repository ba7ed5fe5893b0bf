"""How a foreign model computes a step: all tokens at once, on our attention, or sequence after sequence, on its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.attention.grouped import LayerKind
from worker.attention.kept import KeptPlan
from worker.models.errors import ModelError
from worker.models.foreign.interface import NAME, answering
from worker.models.foreign.past import Keep, flat_past, past_of_one
from worker.models.foreign.survey import Reader, Survey


class Manner(Protocol):
    """One of them."""

    attention: str
    """What transformers is to call it by."""

    def survey(self, model: Any, num_tokens: int, num_positions: int) -> list[LayerKind]:
        """What one pass over a few tokens asks of the pool. Raises ModelError, and whatever the model raises."""
        ...

    def compute(self, model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Any) -> Tensor:
        """[num_tokens], [num_tokens], [num_logits] -> [num_logits, vocab_size] f32; positions may be shifted against
        the plan's.
        """
        ...


class Together:
    """Through the attention interface."""

    attention = NAME

    def __init__(self, has_past: bool) -> None:
        """``has_past``: the model is told of one."""
        self._has_past = has_past
        self._reader = Reader()
        self._num_layers = 0

    def survey(self, model: Any, num_tokens: int, num_positions: int) -> list[LayerKind]:
        """See Manner."""
        survey = Survey(num_positions)
        places = torch.arange(num_tokens, device=model.device)
        with answering(survey):
            self._compute(model, places, places, places)
        if not survey.kinds:
            raise ModelError("its attention does not go through transformers' interface")
        self._num_layers = len(survey.kinds)
        return survey.kinds

    def compute(self, model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Any) -> Tensor:
        """See Manner. The plan is of a GroupedAttention."""
        reader = self._reader
        reader.plan, reader.next_layer = plan, 0
        with answering(reader):
            logits = self._compute(model, token_ids, positions, rows)
        assert reader.next_layer == self._num_layers, f"{reader.next_layer} layers asked, of {self._num_layers}"
        return logits

    def _compute(self, model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return logits_of(model, token_ids, positions, rows, flat_past(positions) if self._has_past else None)


class InTurn:
    """Through the cache that each layer hands its keys and values."""

    attention = "eager"

    def survey(self, model: Any, num_tokens: int, num_positions: int) -> list[LayerKind]:
        """See Manner."""
        places = torch.arange(num_tokens, device=model.device)
        kinds: list[LayerKind] = []

        def note(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != num_tokens:
                raise ModelError("it caches something else than the keys and values of its tokens")
            num_kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
            kinds.append(LayerKind(num_kv_heads, num_kv_heads, key_dim, value_dim, scale=1.0, window=0))
            return keys, values

        logits_of(model, places, places, places, past_of_one(0, 0, note))
        if not kinds:
            raise ModelError("its layers hand no keys and values to a cache")
        return kinds

    def compute(self, model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor, plan: Any) -> Tensor:
        """See Manner. The plan is of a Kept."""
        assert isinstance(plan, KeptPlan)
        wanted = rows.tolist()
        found = []
        for number, extent in enumerate(plan.extents):
            first, end = extent.row, extent.row + extent.num_tokens
            own = torch.tensor([row - first for row in wanted if first <= row < end], dtype=torch.long)
            past = past_of_one(int(positions[first]), extent.start, _keeping(plan, number))
            found.append(logits_of(model, token_ids[first:end], positions[first:end], own.to(rows.device), past))
        return torch.cat(found)


def _keeping(plan: KeptPlan, number: int) -> Keep:
    def keep(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        all_keys, all_values = plan.keep(number, layer, keys[0], values[0])
        return all_keys[None], all_values[None]

    return keep


def logits_of(model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor, past: Any = None) -> Tensor:
    """The pass itself, by whatever attention the model is set to: [len(rows), vocab_size] f32."""
    inputs: dict[str, Any] = {"input_ids": token_ids[None], "use_cache": past is not None}
    known: Sequence[str] = list(inspect.signature(model.forward).parameters)
    if "position_ids" in known:
        inputs["position_ids"] = positions[None]
    if past is not None:
        inputs["cache" if "cache" in known else "past_key_values"] = past  # the latter before transformers 5.24
    if "logits_to_keep" not in known:
        logits: Tensor = model(**inputs).logits[0]
        return logits[rows].float()
    kept: Tensor = model(**inputs, logits_to_keep=rows).logits[0]
    return kept.float()
