"""Matrices of four-bit codes, a scale and an offset for each group of inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from worker.models.forms import Int4


class Int4Linear:
    """A Linear that unpacks the matrix in every call: for devices and types that nothing faster serves."""

    __slots__ = ("_bias", "_form", "in_features", "out_features")

    def __init__(self, form: Int4, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        self._form, self._bias = form, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return F.linear(x, self._form.dense(x.dtype), self._bias)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self(x).float()
