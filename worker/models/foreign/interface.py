"""Where transformers' models meet our attention: the functions that are registered with them under our name.

A model calls them deep inside of its forward pass; whoever runs the pass says with ``answering`` who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "penstock"

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Of batch, head, query and key positions: whether the one sees the other."""


class Answers(Protocol):
    """What a pass asks."""

    def mark(self, mask: MaskFunction, device: torch.device | str) -> float:
        """A number that stands for this mask, at most 255, which every floating type holds. ``device``: where the mask
        has tensors of its own, if it has any."""
        ...

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
        """queries [num_tokens, num_heads, key_dim], keys [num_tokens, num_kv_heads, key_dim], values [num_tokens,
        num_kv_heads, value_dim] -> [num_tokens, num_heads, value_dim]. ``mask``: full of a mark, unless the model made
        something else of it.
        """
        ...


_answers: Answers | None = None


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """While a model computes. A process computes one pass at a time."""
    global _answers
    assert _answers is None, "a pass within a pass"
    _answers = answers
    try:
        yield
    finally:
        _answers = None


def register() -> None:
    """With transformers; again is no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Each [1, heads, num_tokens, dim] -> [1, num_tokens, num_heads, value_dim]."""
    assert _answers is not None, "a pass that nobody answers"
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    out = _answers.attend(module, rows[0], rows[1], rows[2], attention_mask, scaling, others)
    return out.contiguous()[None], None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """[batch_size, 1, q_length, kv_length], all of it one number."""
    assert _answers is not None, "a pass that nobody answers"
    mark = torch.full((1, 1, 1, 1), _answers.mark(mask_function, device), dtype=dtype, device=device)
    return mark.expand(batch_size, 1, q_length, kv_length)
