"""MXFP4 (OCP Microscaling Formats 1.0, section 5) as gpt-oss publishes its experts: numbers of four bits, e2m1, two a
byte, the first in its lower half, and a power of two for each 32 of an output's inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.shard import Part
from worker.models.weights import Checkpoint

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes from 0 on; those from 8 on are the same below zero."""
ONE = 127
"""The exponent of a scale of 1."""
NO_NUMBER = 255
"""The exponent that says so: all that it scales are infinite or no numbers, as in transformers."""
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of their tensors end."""


class Mxfp4:
    """See Importer; experts become floats when they are loaded."""

    def __init__(self, fields: Fields) -> None:
        """What is packed is told by the tensors' names."""

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer: none but those of experts are packed."""
        return None

    def stack(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], part: Part | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Matrices of all experts, [num_experts, in, out] in ``dtype``, or their part; None where these are floats.
        Raises ModelError, and ValueError where a group would be cut."""
        if f"{name}{BLOCKS}" not in checkpoint:
            return None
        num_experts, num_inputs, num_outputs = shape
        groups = (num_experts, num_outputs, -(-num_inputs // GROUP))
        if part is not None:
            num_inputs, part = _in_groups(part, num_inputs)
        blocks = checkpoint.take(f"{name}{BLOCKS}", (*groups, GROUP // 2), part, dtypes=(torch.uint8,))
        scales = checkpoint.take(f"{name}{SCALES}", groups, part, dtypes=(torch.uint8,))
        values = torch.tensor((*VALUES, *(-value for value in VALUES)))
        experts = torch.empty((*blocks.shape[:2], num_inputs), dtype=dtype)
        for expert, codes, exponents in zip(experts, blocks, scales, strict=True):
            numbers = values[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
            expert.copy_(torch.ldexp(numbers, exponents[..., None].int() - ONE).flatten(1)[:, :num_inputs])
        return experts.transpose(1, 2)


def _in_groups(part: Part, num_inputs: int) -> tuple[int, Part]:
    """Of [num_experts, in, out] -> how many inputs it has, and the part of [num_experts, out, in / 32, ...] that it is.
    Raises ValueError where it would cut a group.
    """
    columns = part.columns
    assert columns is not None
    if part.dim == 2:
        return num_inputs, replace(part, dim=1)
    if columns.start % GROUP or (columns.stop % GROUP and columns.stop < num_inputs):
        raise ValueError(f"columns {columns.start} to {columns.stop} cut a group of {GROUP}")
    return len(columns), Part(part.rows, range(columns.start // GROUP, -(-columns.stop // GROUP)), 2)
