"""NVIDIA's Model Optimizer: FP8 (e4m3) with one scale a matrix, or one for each of its rows.

Its names are those of ``hf_quant_config.json``, beside config.json, or of ``quantization_config`` in newer files, where
what is left out is called ``ignore``. Modules are left out by name, or by a name with asterisks.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.importers.packing import float_8, matches
from worker.models.weights import Checkpoint

_BY_MATRIX, _BY_ROW = "FP8", "FP8_PER_CHANNEL_PER_TOKEN"


class ModelOpt:
    """See Importer."""

    def __init__(self, fields: Fields) -> None:
        """Raises ModelError."""
        algorithm = fields.text("quant_algo")
        if algorithm not in (_BY_MATRIX, _BY_ROW):
            raise ModelError(
                f"the {algorithm[:80]} of this {fields.architecture}, quantised by modelopt, is not supported, but"
                f" {_BY_MATRIX} and {_BY_ROW}"
            )
        self._left_out: list[str] = []
        for key in ("exclude_modules", "ignore"):
            entries = fields.raw.get(key) or []
            if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
                raise fields.wrong(key, entries)
            self._left_out += entries

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer."""
        if matches(name, self._left_out) or any(fnmatchcase(name, entry) for entry in self._left_out if "*" in entry):
            return None
        codes = checkpoint.take(f"{name}.weight", shape, dtypes=(torch.float8_e4m3fn,))
        scale = checkpoint.take_one_of(f"{name}.weight_scale", ((), (1,), (shape[0],), (shape[0], 1)))
        return float_8(codes, scale.float().reshape(-1, 1).expand(shape[0], 1), None, name, fit)
