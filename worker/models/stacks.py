"""The matrices of all experts in one piece of memory, for kernels that multiply with all of them in one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from worker.models.forms import Form, Int4, Plain


@dataclass(frozen=True, slots=True)
class Stack:
    """One product's, of all experts of a layer."""

    matrices: Tensor
    """[num_experts, out, in]: floats, int8, or float8_e4m3fn; or four-bit codes as Int4 has them."""
    scales: Tensor | None = None
    """[num_experts, out] f32, of codes; of four-bit ones [num_experts, out, in / group], as offsets."""
    offsets: Tensor | None = None
    group: int = 0
    """Inputs that share a scale, of four-bit codes."""
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
        if stack is None or not _goes_with(form, stack):
            self._is_one = False
            return form
        own = stack.matrices[place]
        if isinstance(form, Plain):
            own.copy_(form.weight)
            return Plain(own)
        assert stack.scales is not None
        own.copy_(form.codes)
        scales = stack.scales[place].copy_(form.scales)
        if isinstance(form, Int4):
            assert stack.offsets is not None
            return Int4(own, scales, stack.offsets[place].copy_(form.offsets), form.group)
        return type(form)(own, scales)

    def finish(self, bias: Tensor | None) -> Stack | None:
        """Of all; None where they are not alike."""
        if self._stack is None or not self._is_one:
            return None
        assert self._num_taken == self._num_experts
        return replace(self._stack, bias=bias)


def _empty_like(form: Form, num_experts: int) -> Stack | None:
    def empty(like: Tensor) -> Tensor:
        return like.new_empty((num_experts, *like.shape))

    if isinstance(form, Plain):
        return Stack(empty(form.weight))
    if isinstance(form, Int4):
        return Stack(empty(form.codes), empty(form.scales), empty(form.offsets), form.group)
    return Stack(empty(form.codes), empty(form.scales))


def _goes_with(form: Form, stack: Stack) -> bool:
    """Where inputs have another order, each expert has its own."""
    codes = form.weight if isinstance(form, Plain) else form.codes
    group, order = (form.group, form.order) if isinstance(form, Int4) else (0, None)
    is_alike = codes.dtype is stack.matrices.dtype and codes.shape == stack.matrices.shape[1:]
    return is_alike and group == stack.group and order is None
