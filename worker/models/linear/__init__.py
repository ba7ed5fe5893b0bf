"""Matrices that multiply: each stored form in the layout that is fastest on its device.

``linear_of`` chooses; every kind is held against the form's ``dense`` by tests.
"""

from __future__ import annotations

from torch import Tensor

from worker.models.forms import Form, Fp8, Int4, Int8, Plain
from worker.models.linear.base import Linear, Means
from worker.models.linear.by_head import HeadLinear
from worker.models.linear.floats import FloatLinear
from worker.models.linear.int4 import Int4Linear, PackedInt4Linear
from worker.models.linear.int8 import Int8Linear
from worker.models.linear.plain import PlainLinear, packs_bfloat16
from worker.models.linear.repeatable import RepeatableLinear
from worker.models.linear.scaled import ScaledLinear
from worker.triton import has_triton

__all__ = ["Linear", "Means", "linear_by_head", "linear_of", "packs_bfloat16"]


ALONE = Means()
"""torch, and what it has."""


def linear_of(form: Form, bias: Tensor | None = None, means: Means = ALONE, gated: bool = False) -> Linear:
    """``bias`` [out] in the type of the activations; ``gated``: its lower half opens its upper half."""
    linear = _linear_of(form, bias, means, gated)
    if means.is_repeatable and not _is_packed(linear):
        return RepeatableLinear(linear)
    return linear


def linear_by_head(weight: Tensor, means: Means) -> Linear:
    """``weight`` [num_heads, in, out]: see HeadLinear."""
    linear = HeadLinear(weight)
    return RepeatableLinear(linear) if means.is_repeatable else linear


def _is_packed(linear: Linear) -> bool:
    """For our own kernels, which add up in one order however many rows there are."""
    return isinstance(linear, Int8Linear | PackedInt4Linear | FloatLinear) or (
        isinstance(linear, PlainLinear) and linear.packed is not None
    )


def _linear_of(form: Form, bias: Tensor | None, means: Means, gated: bool) -> Linear:
    if isinstance(form, Plain):
        if means.kernels is not None and FloatLinear.serves(form, means.kernels):
            return FloatLinear(form, bias, means.kernels)
        return PlainLinear(form.weight, bias, means.kernels, gated, means.may_code)
    kernels = means.kernels if means.rounds_inputs else None
    if has_triton(form.codes.device):
        from worker.models.linear.on_cuda import CudaFp8Linear, CudaInt4Linear
        from worker.models.linear.scaled_on_cuda import CudaScaledLinear

        if isinstance(form, Int4):
            return CudaInt4Linear(form, bias)
        if isinstance(form, Fp8) and means.rounds_inputs and CudaFp8Linear.serves(form):
            return CudaFp8Linear(form, bias)
        return CudaScaledLinear(form, bias, means.rounds_inputs)
    if isinstance(form, Int4) and kernels is not None and PackedInt4Linear.serves(form, kernels):
        return PackedInt4Linear(form, bias, kernels, gated, means.is_repeatable)
    if isinstance(form, Int8) and kernels is not None and Int8Linear.serves(form, kernels):
        return Int8Linear(form, bias, kernels, gated)
    if means.kernels is not None and FloatLinear.serves(form, means.kernels):
        return FloatLinear(form, bias, means.kernels)
    return Int4Linear(form, bias) if isinstance(form, Int4) else ScaledLinear(form, bias)
