"""A layer's experts on CUDA devices, by the kernels of ``worker.triton.experts``. Importing this imports Triton.

Owns how the work is cut into programs: by the number of tokens alone, so that equal steps are cut alike and no number
has to come from the device. Its sizes follow what vLLM and SGLang publish as tuned for such devices, and are not
measured here yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.models.architecture import Activation, Mixture
from worker.models.stacks import Stack
from worker.models.triton_ops import TritonOps
from worker.triton import experts as kernels
from worker.triton.cut import STEP_BYTES
from worker.triton.device import float8_as, multiplies, num_processors

_SORTED_AT_ONCE = (128, 1024)
"""Pairs, where there are few and where there are many."""
_SUMMED_AT_ONCE = 1024
_ROW_BYTES = 128
"""Of a matrix's rows that are read at once."""
_STAGE_BYTES = 96 << 10
"""For what is being loaded while other numbers are multiplied: sm_89 has least shared memory, 99 KiB a program."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program multiplies."""

    pairs: int
    """Of token and expert; also the size of the blocks that pairs are sorted into."""
    outputs: int
    """Of each matrix: there are two where gates open something."""
    inputs: int
    """At once."""
    num_stages: int
    num_warps: int

    @classmethod
    def of(cls, pairs: int, outputs: int, num_matrices: int, stack: Stack, x_itemsize: int) -> Tile:
        """For activations whose numbers have x_itemsize bytes."""
        is_large, itemsize = pairs >= 64, float(stack.matrices.element_size())
        if stack.group:
            inputs, itemsize = stack.group, 0.5
        else:
            is_wide = is_large or x_itemsize > 2
            inputs = _ROW_BYTES // (max(int(itemsize), x_itemsize) if is_wide else int(itemsize))
        stage_bytes = inputs * (pairs * x_itemsize + num_matrices * outputs * itemsize)
        num_stages = max(2, min(3 if is_large else 4, int(_STAGE_BYTES / stage_bytes)))
        return cls(pairs, outputs, inputs, num_stages, 8 if is_large else 4)


def pairs_at_once(num_pairs: int, num_experts: int) -> int:
    """So many that an expert's go into one block where they are shared out evenly, and 16 to 128: tensor cores multiply
    16 or none, and more do not fit into registers."""
    return min(128, max(16, int(triton.next_power_of_2(triton.cdiv(num_pairs, num_experts)))))


def outputs_at_once(num_pairs: int, num_experts: int, num_outputs: int, num_matrices: int, num_programs: int) -> int:
    """Of one matrix. Few pairs are for as many programs as run at once, since reading is what takes time."""
    if num_pairs > 32 * num_experts:
        return 128 // num_matrices
    num_blocks = min(num_pairs, num_experts)
    return 64 if triton.cdiv(num_outputs, 64) * num_blocks >= num_programs else 32


def max_blocks(num_pairs: int, num_experts: int, size: int) -> int:
    """That so many pairs can fill, each block with pairs of one expert."""
    others = min(num_pairs, num_experts)
    return (num_pairs + others * (size - 1)) // size


class CudaExperts:
    """Of one layer; see Together."""

    def __init__(
        self, mixture: Mixture, gate_up: Stack, down: Stack, correction: Tensor | None, is_repeatable: bool
    ) -> None:
        """``is_repeatable``: see Means."""
        self._mixture, self._correction, self._is_repeatable = mixture, correction, is_repeatable
        self._gate_up, self._down, self._ops = gate_up, down, TritonOps()
        # Unpacking four-bit codes takes registers.
        self._most_at_once = 64 if gate_up.group or down.group else 128

    def __call__(self, x: Tensor, logits: Tensor, activation: Activation) -> Tensor:
        """See Together."""
        num_tokens, num_chosen, num_experts = len(x), self._mixture.num_chosen, self._mixture.num_experts
        y = torch.empty_like(x)
        if not num_tokens:
            return y
        num_pairs = num_tokens * num_chosen
        size = 16 if self._is_repeatable else min(self._most_at_once, pairs_at_once(num_pairs, num_experts))
        weights, chosen = self.route(logits)
        most = max_blocks(num_pairs, num_experts, size)
        order, owners = chosen.new_empty(most * size), chosen.new_empty(most + 1)
        chunk = _SORTED_AT_ONCE[num_pairs > _SORTED_AT_ONCE[0]]
        kernels.sort[(num_experts,)](
            chosen, order, owners, num_pairs, most, BLOCK_M=size,
            BINS=max(32, int(triton.next_power_of_2(num_experts))), CHUNK=chunk,
        )  # fmt: skip
        inner = self._gate_up.matrices.shape[1] // 2
        parts = x.new_empty((num_pairs, y.shape[1]))
        if self._gate_up.group and size >= 64:  # there is no room for two such tiles of codes
            both = x.new_empty((num_pairs, 2 * inner))
            self._multiply(self._gate_up, x, both, order, owners, size, num_chosen, "", None)
            opened = self._ops.gate(both, activation)
        else:
            opened = x.new_empty((num_pairs, inner))
            self._multiply(self._gate_up, x, opened, order, owners, size, num_chosen, activation, None)
        self._multiply(self._down, opened, parts, order, owners, size, 1, "", weights)
        grid = (num_tokens, triton.cdiv(y.shape[1], _SUMMED_AT_ONCE))
        kernels.combine[grid](parts, y, y.shape[1], NUM_EACH=num_chosen, BLOCK=_SUMMED_AT_ONCE)
        return y

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_experts] f32 -> weights f32 and experts i32, [num_tokens, num_chosen]."""
        mixture, correction = self._mixture, self._correction
        num_each = mixture.num_experts // mixture.num_groups
        shape = len(logits), mixture.num_chosen
        weights, chosen = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
        kernels.route[(len(logits),)](
            logits, logits if correction is None else correction, weights, chosen, mixture.num_experts, num_each,
            mixture.scale, NUM_CHOSEN=mixture.num_chosen, NUM_GROUPS=mixture.num_groups,
            NUM_CHOSEN_GROUPS=mixture.num_chosen_groups, SIGMOID=mixture.scores == "sigmoid",
            HAS_CORRECTION=correction is not None, NORMED=mixture.is_normed,
            BLOCK_G=triton.next_power_of_2(mixture.num_groups), BLOCK_E=triton.next_power_of_2(num_each),
            BLOCK_C=triton.next_power_of_2(mixture.num_chosen),
        )  # fmt: skip
        return weights, chosen

    def _multiply(
        self, stack: Stack, x: Tensor, y: Tensor, order: Tensor, owners: Tensor, size: int, pairs_each: int,
        activation: str, factors: Tensor | None,
    ) -> None:  # fmt: skip
        num_pairs, num_outputs = y.shape
        num_experts, num_matrices = len(stack.matrices), 2 if activation else 1
        outputs = 64
        if not self._is_repeatable:
            outputs = outputs_at_once(num_pairs, num_experts, num_outputs, num_matrices, num_processors(x.device))
        if stack.group * x.element_size() > STEP_BYTES:
            outputs = min(outputs, 64)
        tile = Tile.of(size, outputs, num_matrices, stack, x.element_size())
        is_of_rows = stack.scales is not None and not stack.group
        kind, as_loaded = float8_as(stack.matrices)
        most = len(owners) - 1
        kernels.multiply[(triton.cdiv(num_outputs, outputs), most)](
            stack.matrices.view(as_loaded), x if stack.scales is None else stack.scales,
            x if stack.offsets is None else stack.offsets, x if stack.bias is None else stack.bias, x, order, owners,
            x if factors is None else factors, y, num_pairs, most, num_outputs, x.shape[1], x.stride(0),
            PAIRS_EACH=pairs_each, ACTIVATION=activation, MULTIPLY=multiplies(x), FLOAT8=kind, GROUP=stack.group,
            HAS_SCALES=is_of_rows, HAS_BIAS=stack.bias is not None, HAS_FACTORS=factors is not None,
            BLOCK_N=tile.outputs, BLOCK_M=tile.pairs, BLOCK_K=tile.inputs,
            num_stages=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
