"""Matrices of floats, in the layout that multiplies fastest where they live."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.linear.base import Stored
from worker.native import Library, PackedMatrix


class PlainLinear:
    """A Linear over weight [out, in] in x's dtype.

    On the CPU a bfloat16 weight is repacked, and the plain copy is not kept: for our own kernels where the processor
    multiplies bfloat16, in twelve bits a weight and without loss where that is wanted and its exponents allow it; else
    for oneDNN's blocked layout, which reads it at close to memory bandwidth where F.linear repacks in every call.
    """

    __slots__ = ("_bias", "_kernels", "_multiply", "_packed", "_weight", "in_features", "out_features", "packed")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Library | None,
        gated: bool,
        may_code: bool,
    ) -> None:
        """``gated``: see linear_of; ``may_code``: see Means.codes."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._kernels: Library | None = None
        self.packed: PackedMatrix | None = None
        """For our own kernels."""
        if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
            return
        if kernels is not None and kernels.has_linear and self.in_features % 32 == 0:
            self._kernels = kernels
            code = kernels.code if may_code else None
            self.packed, self._weight = PackedMatrix(weight, bias, gated, code), None
        elif packs_bfloat16():
            operators: Any = torch.ops.mkldnn
            self._packed, self._weight = operators._reorder_linear_weight(weight), None
            self._multiply = operators._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self._kernels is not None and self.packed is not None:
            return self._kernels.linear(x, self.packed, torch.bfloat16)
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        num_tokens = len(x)
        padded = _rounded(num_tokens)
        if padded != num_tokens:
            x = F.pad(x, (0, 0, 0, padded - num_tokens))
        y = cast(Tensor, self._multiply(x, self._packed, self._bias, "none", (), ""))
        return y if padded == num_tokens else y[:num_tokens]

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self._kernels is not None and self.packed is not None:
            return self._kernels.linear(x, self.packed, torch.float32)
        return self(x).float()

    def stored(self) -> Stored | None:
        """As it lies; None where it is repacked."""
        return None if self._weight is None else Stored(self._weight, bias=self._bias)


def _rounded(num_tokens: int) -> int:
    """Up to one of few sizes. oneDNN compiles code for each number of rows that it meets, which takes as long as
    multiplying hundreds of them; the rows that are added take a tenth of the time, the worst case.
    """
    if num_tokens <= 16:
        return num_tokens
    step = 16 if num_tokens <= 128 else 32
    return -(-num_tokens // step) * step


@cache
def packs_bfloat16() -> bool:
    """Whether this torch has oneDNN, its packed linear, and a CPU that oneDNN computes bfloat16 on."""
    operators: Any = torch.ops.mkldnn
    try:
        return bool(
            operators._is_mkldnn_bf16_supported() and operators._reorder_linear_weight and operators._linear_pointwise
        )
    except (AttributeError, RuntimeError):
        return False
