"""What a decoder asks of a matrix."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """y = x @ weight.T + bias, however the weight is stored."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in] -> [num_tokens, out], in x's dtype."""
        ...

    def wide(self, x: Tensor) -> Tensor:
        """The same as float32."""
        ...
