"""Matrices whose weights become floats on their way to be multiplied, with inputs as they are: for processors that
multiply nothing smaller, and for whoever does not want inputs rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.forms import Form, Int4, Plain
from worker.native import FloatMatrix, Library


class FloatLinear:
    """A Linear on the CPU by the compiled kernels, in float32: a row's product has the same bits in any company. What a
    model in float32 has in bfloat16 is kept so; the plain weights are not kept."""

    __slots__ = ("_kernels", "_order", "in_features", "out_features", "packed")

    def __init__(self, form: Form, bias: Tensor | None, kernels: Library) -> None:
        self.out_features, self.in_features = form.shape
        self._kernels, panel = kernels, kernels.float_panel
        self._order = form.order if isinstance(form, Int4) else None
        if isinstance(form, Plain):
            self.packed = FloatMatrix.of_floats(form.weight, panel, bias)
        elif isinstance(form, Int4):
            self.packed = FloatMatrix.of_int4(form.codes, form.scales, form.offsets, form.group, panel, bias)
        else:
            self.packed = FloatMatrix.of_codes(form.codes, form.scales, panel, bias)

    @property
    def is_in_order(self) -> bool:
        """Whether inputs are multiplied in the order in which they come."""
        return self._order is None

    @staticmethod
    def serves(form: Form, kernels: Library) -> bool:
        """Whether it is for matrices that nothing faster multiplies, and this is one."""
        if not isinstance(form, Plain):
            return form.codes.device.type == "cpu"
        dtypes = (torch.float32,) if kernels.has_linear else (torch.float32, torch.bfloat16)
        return form.weight.device.type == "cpu" and form.weight.dtype in dtypes

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self._order is not None:
            x = x[:, self._order]
        return self._kernels.linear_as_floats(x.float().contiguous(), self.packed)
