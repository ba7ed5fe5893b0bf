"""The matrices of all experts in one piece of memory, for kernels that multiply with all of them in one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.models.forms import Form, Fp8, Int4, Int8, Plain


@dataclass(frozen=True, slots=True)
class Stack:
    """One product's, of all experts of a layer."""

    matrices: Tensor
    """[num_experts, out, in]: floats, int8, or float8_e4m3fn."""
    scales: Tensor | None = None
    """[num_experts, out] f32, of codes."""
    bias: Tensor | None = None
    """[num_experts, out] in the type of the activations."""


class Stacking:
    """Takes them as they come, so that there is but one of them outside at a time."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts, self._num_taken = num_experts, 0
        self._stack: Stack | None = None
        self._is_one = True

    def put(self, form: Form) -> Form:
        """The next one, -> the same in its place; as it is where it does not go with those before."""
        if self._num_taken == 0:
            self._stack = _empty_like(form, self._num_experts)
        place, self._num_taken = self._num_taken, self._num_taken + 1
        stack = self._stack
        if stack is None or isinstance(form, Int4) or not _goes_with(form, stack):
            self._is_one = False
            return form
        own = stack.matrices[place]
        if isinstance(form, Plain):
            own.copy_(form.weight)
            return Plain(own)
        assert stack.scales is not None
        own.copy_(form.codes)
        stack.scales[place].copy_(form.scales)
        return type(form)(own, stack.scales[place])

    def finish(self, bias: Tensor | None) -> Stack | None:
        """Of all; None where they are not alike, or have groups of codes."""
        if self._stack is None or not self._is_one:
            return None
        assert self._num_taken == self._num_experts
        return replace(self._stack, bias=bias)


def _empty_like(form: Form, num_experts: int) -> Stack | None:
    if isinstance(form, Int4):
        return None
    if isinstance(form, Plain):
        return Stack(form.weight.new_empty((num_experts, *form.shape)))
    codes = form.codes.new_empty((num_experts, *form.shape))
    return Stack(codes, form.scales.new_empty((num_experts, len(form.scales))))


def _goes_with(form: Plain | Int8 | Fp8, stack: Stack) -> bool:
    codes = form.weight if isinstance(form, Plain) else form.codes
    return codes.dtype is stack.matrices.dtype and torch.Size(form.shape) == stack.matrices.shape[1:]
