"""Matrices of four-bit codes, a scale and an offset for each group of inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.forms import Int4
from worker.native import Library, PackedInt4

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
    """A Linear on the CPU by the compiled kernels; the plain codes are not kept.

    Inputs are rounded to int8, each group of each token by its largest; of many tokens, unless each is to have the same
    bits in any company, each token by its largest, and the matrix to int8 on the way. What that costs in accuracy is in
    benchmarks/quantised.md.
    """

    __slots__ = ("_kernels", "_order", "in_features", "out_features", "packed")

    def __init__(self, form: Int4, bias: Tensor | None, kernels: Library, gated: bool, is_repeatable: bool) -> None:
        """``gated``: see linear_of; ``is_repeatable``: see Means."""
        self.out_features, self.in_features = form.shape
        self.packed = PackedInt4(form.codes, form.scales, form.offsets, form.group, bias, gated, not is_repeatable)
        self._order, self._kernels = form.order, kernels

    @property
    def is_in_order(self) -> bool:
        """Whether inputs are multiplied in the order in which they come."""
        return self._order is None

    @staticmethod
    def serves(form: Int4, kernels: Library) -> bool:
        """Whether the matrix can be packed here."""
        return kernels.has_int8 and form.codes.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.dtype is torch.float16:
            return self.wide(x).to(x.dtype)
        return self._kernels.linear_rounded(self._in_order(x), self.packed, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        x = x.float() if x.dtype is torch.float16 else x
        return self._kernels.linear_rounded(self._in_order(x), self.packed, torch.float32)

    def _in_order(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[:, self._order]
