"""A matrix of its own for each head."""

from __future__ import annotations

import torch
from torch import Tensor


class HeadLinear:
    """A Linear of heads side by side, each of which is multiplied with its own of weight [num_heads, in, out]."""

    __slots__ = ("_weight", "in_features", "num_heads", "out_features")

    def __init__(self, weight: Tensor) -> None:
        self.num_heads, num_inputs, num_outputs = weight.shape
        self.in_features, self.out_features = self.num_heads * num_inputs, self.num_heads * num_outputs
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        heads = x.view(len(x), self.num_heads, -1).transpose(0, 1)
        return torch.bmm(heads, self._weight).transpose(0, 1).flatten(1)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self(x).float()
