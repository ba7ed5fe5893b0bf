"""What a foreign model asks of attention, layer by layer, found by letting it compute a few tokens.

What is asked for and cannot be given is a ModelError that says what it is, without the model's name: a wrong answer is
worse than none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.base import Scores
from worker.attention.grouped import LayerKind
from worker.attention.reference import attend, visible
from worker.models.errors import ModelError
from worker.models.foreign.interface import MaskFunction
from worker.models.foreign.views import window_of

HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
"""What models hand on besides: what says no more than the mask does, and what is not attention's business."""


class Survey:
    """Answers one pass over one whole sequence, plainly, and notes what was asked."""

    def __init__(self, num_positions: int) -> None:
        self.kinds: list[LayerKind] = []
        self._num_positions = num_positions
        self._windows: list[int | None] = []

    def mark(self, mask: MaskFunction, device: torch.device | str) -> float:
        """See Answers. 0 is left to masks that are made of nothing."""
        try:
            self._windows.append(window_of(mask, self._num_positions, device))
        except Exception as error:
            raise ModelError(f"its mask cannot be read: {error}") from None
        return float(len(self._windows))

    def attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Any,
        scale: float | None,
        others: dict[str, Any],
    ) -> Tensor:
        """See Answers."""
        window = self._window(module, mask)
        softcap, sinks = others.pop("softcap", None), others.pop("s_aux", None)
        unknown = sorted(key for key, value in others.items() if key not in HARMLESS and value is not None)
        if unknown:
            raise ModelError(f"{self._place(module)} asks attention for {unknown[0]}, which is not served")
        if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelError(f"{self._place(module)} attends in both directions, which does not generate text")
        if scale is not None and not isinstance(scale, float | int):
            raise ModelError(f"{self._place(module)} scales each score by another number, which is not served")
        num_heads, key_dim = queries.shape[1:]
        kind = LayerKind(
            num_heads=num_heads,
            num_kv_heads=keys.shape[1],
            key_dim=key_dim,
            value_dim=values.shape[2],
            scale=key_dim**-0.5 if scale is None else float(scale),
            window=window,
            softcap=float(softcap or 0.0),
            sinks=None if sinks is None else sinks.detach().flatten().float(),
        )
        if num_heads % kind.num_kv_heads or len(keys) != len(queries):
            raise ModelError(f"{self._place(module)} attends to keys that are not those of the same tokens")
        if kind.sinks is not None and len(kind.sinks) != num_heads:
            raise ModelError(f"{self._place(module)} has {len(kind.sinks)} attention sinks for {num_heads} heads")
        self.kinds.append(kind)
        seen = visible(0, len(queries), window, queries.device)
        scores = Scores(kind.scale, (), kind.softcap)
        return attend(queries, keys.transpose(0, 1), values.transpose(0, 1), seen, scores, kind.sinks)

    def _window(self, module: nn.Module, mask: Any) -> int:
        if not isinstance(mask, Tensor) or not mask.is_floating_point() or not mask.numel():
            raise ModelError(f"{self._place(module)} attends without a causal mask, which is not served")
        mark = mask.flatten()[0]
        number = int(mark) if 0 < mark <= len(self._windows) else 0
        if not number or not bool((mask == number).all()):
            raise ModelError(f"{self._place(module)} makes a mask of its own, which is not served")
        window = self._windows[number - 1]
        if window is None:
            raise ModelError(
                f"{self._place(module)} lets tokens see neither all tokens before them nor a window of these,"
                " which is not served"
            )
        return window if window < self._num_positions else 0

    def _place(self, module: nn.Module) -> str:
        return f"its {type(module).__name__}"


class Reader:
    """Answers the passes that are served: from a step's plan."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.next_layer = 0

    def mark(self, mask: MaskFunction, device: torch.device | str) -> float:
        """See Answers: nobody reads it."""
        return 1.0

    def attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Any,
        scale: float | None,
        others: dict[str, Any],
    ) -> Tensor:
        """See Answers. Layers come in the order of the survey."""
        layer = self.next_layer
        self.next_layer += 1
        mixed: Tensor = self.plan.attend(layer, queries, keys, values)
        return mixed.reshape(len(queries), queries.shape[1], -1)
