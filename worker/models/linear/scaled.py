"""Matrices of codes with one scale a row: int8 and fp8, the weights alone quantised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.forms import Fp8, Int8

_FEW_ROWS = 4
"""One row takes 0.4 of the time that it takes with codes that are widened first, eight as much (896 by 4,864)."""
_WHOLE_INPUTS = 16
"""So many at a time torch reads then, without a look at where a row of codes ends."""


class ScaledLinear:
    """A Linear that multiplies with the codes, which any floating type holds exactly, and scales the products.

    The codes are widened in every call, so this is for devices and types that nothing faster serves; on the CPU torch
    multiplies a few rows of bfloat16 with int8 as it lies there.
    """

    __slots__ = ("_bias", "_form", "_ones", "in_features", "out_features")

    def __init__(self, form: Int8 | Fp8, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        self._form, self._bias = form, bias
        is_whole = self.in_features % _WHOLE_INPUTS == 0
        is_narrow = isinstance(form, Int8) and form.codes.device.type == "cpu" and is_whole
        self._ones = torch.ones(self.out_features, dtype=torch.bfloat16) if is_narrow else None

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        y = self._product(x).to(torch.float32) * self._form.scales
        return y if self._bias is None else y + self._bias

    def _product(self, x: Tensor) -> Tensor:
        codes = self._form.codes
        if self._ones is not None and x.dtype is torch.bfloat16 and len(x) <= _FEW_ROWS:
            return torch._weight_int8pack_mm(x, codes, self._ones)
        return F.linear(x, codes.to(x.dtype))
