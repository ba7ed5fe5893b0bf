"""FP8 as DeepSeek-V3 and Qwen 3 publish it: e4m3 with a scale for each block of 128 by 128, and the plainer kind with
one scale a matrix.
"""

from __future__ import annotations

import torch

from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.importers.packing import float_8, matches
from worker.models.weights import Checkpoint


class FinegrainedFp8:
    """See Importer."""

    def __init__(self, fields: Fields) -> None:
        """Raises ModelError."""
        kind = fields.text("fmt", "e4m3")
        if kind != "e4m3":
            raise ModelError(f"the FP8 format {kind[:80]} of this {fields.architecture} is not supported, but e4m3")
        self._block: tuple[int, int] | None = None
        block = fields.raw.get("weight_block_size")
        if block is not None:
            if (
                not isinstance(block, list)
                or len(block) != 2
                or not all(type(size) is int and size > 0 for size in block)
            ):
                raise fields.wrong("weight_block_size", block)
            self._block = block[0], block[1]
        self._left_out = ["lm_head"]
        for key in ("modules_to_not_convert", "ignored_layers"):
            entries = fields.raw.get(key) or []
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise fields.wrong(key, entries)
            self._left_out += entries

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer."""
        if matches(name, self._left_out):
            return None
        codes = checkpoint.take(f"{name}.weight", shape, dtypes=(torch.float8_e4m3fn,))
        if self._block is None:
            inverse = f"{name}.weight_scale_inv"  # as transformers calls it, and multiplies by it all the same
            scale_name = inverse if inverse in checkpoint else f"{name}.weight_scale"
            scale = checkpoint.take_one_of(scale_name, ((), (1,), (shape[0], 1)))
            return float_8(codes, scale.float().reshape(-1, 1).expand(shape[0], 1), None, name, fit)
        blocks = -(-shape[0] // self._block[0]), -(-shape[1] // self._block[1])
        scales = checkpoint.take(f"{name}.weight_scale_inv", blocks).float()
        return float_8(codes, scales, self._block, name, fit)
