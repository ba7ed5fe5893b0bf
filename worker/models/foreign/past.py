"""What a foreign model is told of the past: the stand-in for transformers' Cache.

Models ask it how many tokens were before, some to find the positions of new ones; and hand it their keys and values,
and whatever else they would carry from token to token, which is where one that carries a state is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.models.errors import ModelError

Keep = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Keys and values of new tokens, each [1, num_kv_heads, num_tokens, dim], and the number of this call in the pass ->
those to attend to."""


def flat_past(positions: Tensor) -> Any:
    """Of a pass over tokens of many sequences: each has its own number of tokens before the first of the pass, so that
    a model that counts on from there comes to the given positions. Keys and values go through the attention interface.
    """
    before = positions - torch.arange(len(positions), device=positions.device)
    return _kind()(before, 0, lambda keys, values, layer: (keys, values))


def past_of_one(first: int, num_kept: int, keep: Keep) -> Any:
    """Of a pass over one sequence, from position ``first`` on, which finds so many keys and values."""
    return _kind()(first, num_kept, keep)


@cache
def _kind() -> Any:
    from transformers import Cache

    class Past(Cache):
        """Not a list of layers, as its base is: only what models ask for."""

        def __init__(self, num_before: Tensor | int, num_kept: int, keep: Keep) -> None:
            super().__init__(layers=[])
            self._num_before, self._num_kept, self._keep = num_before, num_kept, keep
            self.num_updates = 0

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.num_updates += 1
            return self._keep(key_states, value_states, self.num_updates - 1)

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            return self._num_before

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return self._num_kept

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return self._num_kept + query_length, 0

        def get_max_length(self, layer_idx: int | None = None) -> int:
            return -1

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

        def _refuse(self, *_: Any, **__: Any) -> Any:
            raise ModelError("it carries a state from token to token that is neither keys nor values")

        def update_indexer(self, *_: Any, **__: Any) -> Any:
            raise ModelError("it chooses what to attend to by an indexer, whose keys are kept beside the others")

        get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse
        early_initialization = set_linear_cache = get_linear_cache = _refuse

    return Past
