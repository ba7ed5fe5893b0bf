"""One matrix of the model, in the form that multiplies fastest where it lives."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x @ weight.T + bias for x [num_tokens, in] in the weight's dtype.

    On the CPU a bfloat16 weight is repacked for oneDNN's blocked layout (AMX or AVX512), which reads it at close to
    memory bandwidth where F.linear repacks in every call; the plain copy is not kept.
    """

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight = weight
        self._packed: Tensor | None = None
        if (
            weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            self._packed = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight))
            self._weight = weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in] -> [num_tokens, out]"""
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        return cast(Tensor, _linear_pointwise(x, self._packed, self._bias, "none", (), ""))


_linear_pointwise = torch.ops.mkldnn._linear_pointwise
