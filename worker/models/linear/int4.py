"""Matrices of four-bit codes, a scale and an offset for each group of inputs; the inputs themselves are not rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.forms import Int4
from worker.native import Library, packed_int4

_ROWS_AT_ONCE = 8192
"""That are unpacked at a time: all of an output head would be hundreds of megabytes."""


class Int4Linear:
    """A Linear that unpacks the matrix in every call: for devices and types that nothing faster serves."""

    __slots__ = ("_bias", "_form", "in_features", "out_features")

    def __init__(self, form: Int4, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        self._form, self._bias = form, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self.out_features <= _ROWS_AT_ONCE:
            return F.linear(x, self._form.dense(x.dtype), self._bias)
        starts = range(0, self.out_features, _ROWS_AT_ONCE)
        y = torch.cat([F.linear(x, self._form.rows(at, at + _ROWS_AT_ONCE).dense(x.dtype)) for at in starts], 1)
        return y if self._bias is None else y.add_(self._bias)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self(x).float()


class PackedInt4Linear:
    """A Linear for bfloat16 on the CPU, by the compiled kernels; the plain codes are not kept."""

    __slots__ = ("_bias", "_kernels", "_order", "_packed", "in_features", "out_features")

    def __init__(self, form: Int4, bias: Tensor | None, kernels: Library) -> None:
        self.out_features, self.in_features = form.shape
        self._packed = packed_int4(form.codes, form.scales, form.offsets, form.group)
        self._bias, self._order, self._kernels = bias, form.order, kernels

    @staticmethod
    def serves(form: Int4, dtype: torch.dtype, kernels: Library) -> bool:
        """Whether the matrix can be packed here, for inputs of this type."""
        on_cpu = form.codes.device.type == "cpu"
        return kernels.has_int4 and on_cpu and dtype is torch.bfloat16 and form.group % 32 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.linear_int4(self._in_order(x), self._packed, self._bias, torch.bfloat16)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.linear_int4(self._in_order(x), self._packed, self._bias, torch.float32)

    def _in_order(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[:, self._order]
