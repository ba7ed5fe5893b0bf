"""Matrices of codes with one scale a row: int8 and fp8, the weights alone quantised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.forms import Fp8, Int8


class ScaledLinear:
    """A Linear that multiplies with the codes, which any floating type holds exactly, and scales the products.

    The codes are widened in every call, so this is for devices and types that nothing faster serves.
    """

    __slots__ = ("_bias", "_form", "in_features", "out_features")

    def __init__(self, form: Int8 | Fp8, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        self._form, self._bias = form, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        y = F.linear(x, self._form.codes.to(x.dtype)).to(torch.float32) * self._form.scales
        return y if self._bias is None else y + self._bias
