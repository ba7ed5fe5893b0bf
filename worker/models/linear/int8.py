"""Matrices of int8 codes on the CPU, multiplied as integers: inputs are rounded to int8 too, each token by its largest.

What that costs in accuracy is in benchmarks/quantised.md; where inputs shall stay as they are, scaled.py multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.forms import Int8
from worker.native import Library, filled_up, packed_int8


class Int8Linear:
    """A Linear by the compiled kernels; the plain codes are not kept."""

    __slots__ = ("_bias", "_kernels", "_packed", "in_features", "out_features")

    def __init__(self, form: Int8, bias: Tensor | None, kernels: Library) -> None:
        self.out_features, self.in_features = form.shape
        self._packed = packed_int8(form.codes, form.scales)
        self._bias = None if bias is None else filled_up(bias.float())
        self._kernels = kernels

    @staticmethod
    def serves(form: Int8, kernels: Library) -> bool:
        """Whether the matrix can be packed here."""
        return kernels.has_int8 and form.codes.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.dtype is torch.float16:
            return self.wide(x).to(x.dtype)
        return self._kernels.linear_int8(x, self._packed, self._bias, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        x = x.float() if x.dtype is torch.float16 else x
        return self._kernels.linear_int8(x, self._packed, self._bias, torch.float32)
