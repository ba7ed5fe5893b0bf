"""Matrices of int8 codes on the CPU, multiplied as integers: inputs are rounded to int8 too, each token by its largest.

What that costs in accuracy is in benchmarks/quantised.md; where inputs shall stay as they are, scaled.py multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.forms import Int8
from worker.native import Library, PackedInt8


class Int8Linear:
    """A Linear by the compiled kernels; the plain codes are not kept."""

    __slots__ = ("_kernels", "in_features", "out_features", "packed")

    def __init__(self, form: Int8, bias: Tensor | None, kernels: Library, gated: bool) -> None:
        """``gated``: see linear_of."""
        self.out_features, self.in_features = form.shape
        self.packed = PackedInt8(form.codes, form.scales, bias, gated)
        self._kernels = kernels

    @staticmethod
    def serves(form: Int8, kernels: Library) -> bool:
        """Whether the matrix can be packed here."""
        return kernels.has_int8 and form.codes.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.dtype is torch.float16:
            return self.wide(x).to(x.dtype)
        return self._kernels.linear_rounded(x, self.packed, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        x = x.float() if x.dtype is torch.float16 else x
        return self._kernels.linear_rounded(x, self.packed, torch.float32)
