"""About what a rank's matrices take in memory once they are loaded, told before anything of them is read."""

from __future__ import annotations

from pathlib import Path

import torch

from policies.engine import Quantization
from sources import is_gguf
from worker.models.gguf import GgufFile
from worker.models.importers import Mxfp4, importer_of
from worker.models.linear import Means, packs_bfloat16
from worker.models.shard import Shard

_QUANTISED = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}
"""Bytes of a weight, with its part of a group's scale and offset."""
_CODED = 1.5
"""The same of bfloat16 in twelve bits, see PlainLinear."""
_NOT_WIDENED = 2.0
"""The same of bfloat16 in a model that computes in float32, see FloatLinear."""


def held_bytes(
    path: Path, shard: Shard, dtype: torch.dtype, device: torch.device, quantization: Quantization, means: Means
) -> float:
    """Of all that ``shard`` has of the checkpoint; the other arguments as for ``load_decoder``. Norms and biases are
    too small to count. Raises ModelError.
    """
    whole, kernels = shard.whole, means.kernels if device.type == "cpu" else None
    each: float = dtype.itemsize
    if quantization != "none":
        each = _QUANTISED[quantization]
    elif kernels is not None and dtype is torch.float32 and whole.dtype == "bfloat16":
        each = _NOT_WIDENED
    elif kernels is not None and dtype is torch.bfloat16 and kernels.has_linear and means.may_code:
        each = _CODED
    if is_gguf(path):
        held = GgufFile(path).header.loaded_bytes(each, dtype.itemsize)
        return held * shard.num_parameters / whole.num_parameters
    importer = importer_of(path)
    if importer is not None and not isinstance(importer, Mxfp4):  # whose experts become floats
        in_files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return min(dtype.itemsize, in_files / whole.num_parameters) * shard.num_parameters
    # A tied head that is kept as it came is the embedding; otherwise it is another copy.
    packs = device.type == "cpu" and (
        (dtype is torch.bfloat16 and packs_bfloat16()) or (kernels is not None and dtype is not torch.float16)
    )
    is_shared = whole.tied and quantization == "none" and not packs
    num_heads = shard.is_last and not is_shared
    num_embeddings = shard.is_first or (shard.is_last and whole.tied)
    table = len(shard.vocabulary) * whole.hidden_size
    return (shard.num_layer_parameters + num_heads * table) * each + num_embeddings * table * dtype.itemsize
