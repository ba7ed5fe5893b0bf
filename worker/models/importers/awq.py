"""AWQ (Lin et al. 2023) in the layout of AutoAWQ's "gemm" kernels.

Words of 32 bits pack eight neighbouring outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on:
``qweight`` [in, out / 8], ``qzeros`` [groups, out / 8], ``scales`` [groups, out].
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit, spans
from worker.models.forms import Form
from worker.models.importers.gptq import group_size
from worker.models.importers.packing import four_bits, matches, nibbles, paired
from worker.models.weights import Checkpoint

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each output in its word."""


class Awq:
    """See Importer."""

    def __init__(self, fields: Fields) -> None:
        """Raises ModelError."""
        bits = fields.integer("bits")
        if bits != 4:
            raise ModelError(f"the {bits} bits of this AWQ {fields.architecture} are not supported, but 4")
        layout = fields.text("version", fields.text("format", "gemm")).lower()
        if layout != "gemm":
            raise ModelError(f"the AWQ layout {layout[:80]} of this {fields.architecture} is not supported, but gemm")
        self._group = group_size(fields)
        left_out = fields.raw.get("modules_to_not_convert") or []
        if not isinstance(left_out, list) or not all(isinstance(entry, str) for entry in left_out):
            raise fields.wrong("modules_to_not_convert", left_out)
        self._left_out = ["lm_head", *left_out]

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer."""
        if matches(name, self._left_out):
            return None
        num_outputs, num_inputs = shape
        group = num_inputs if self._group == -1 else self._group
        if num_inputs % group or num_inputs % 2 or num_outputs % 8:
            raise ModelError(f"groups of {group} and words of 8 codes do not divide the matrix of {name}")
        num_groups = num_inputs // group
        words = checkpoint.take(f"{name}.qweight", (num_inputs, num_outputs // 8), dtypes=(torch.int32,))
        packed = checkpoint.take(f"{name}.qzeros", (num_groups, num_outputs // 8), dtypes=(torch.int32,))
        scales = checkpoint.take(f"{name}.scales", (num_groups, num_outputs)).t().float().contiguous()
        codes = torch.empty((num_outputs, num_inputs // 2), dtype=torch.uint8)
        for start, stop in spans(shape):
            start, stop = start // 8 * 8, min(-(-stop // 8) * 8, num_outputs)
            codes[start:stop] = paired(_outputs(words[:, start // 8 : stop // 8]).t())
        zeros = _outputs(packed).t().float().contiguous()
        return four_bits(codes, scales, zeros, None, name, fit)


def _outputs(words: Tensor) -> Tensor:
    """[rows, n] int32 -> [rows, 8 n] uint8"""
    return nibbles(words).view(len(words), -1, 8)[:, :, list(_PLACES)].flatten(1)
