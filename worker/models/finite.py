"""Which of a model's tensors hold values that are no numbers. Asked only when a model has computed such: to look at all
of them takes as long as it takes to read the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from policies.gguf import shown
from sources import is_gguf
from worker.models.errors import ModelError
from worker.models.fitting import VALUES_AT_ONCE, spans
from worker.models.gguf import GgufFile
from worker.models.gguf.blocks import KINDS, values_of
from worker.models.importers.mxfp4 import NO_NUMBER, SCALES


def not_finite(path: Path) -> str:
    """Half a sentence that names the first, empty where there is none. ``path``: a GGUF file, or a directory in Hugging
    Face layout. A few values at a time are unpacked.
    """
    with suppress(ModelError, SafetensorError, OSError, RuntimeError):  # it is the second thing that is wrong
        for name, place, values in _in_gguf(path) if is_gguf(path) else _in_directory(path):
            if not bool(values.isfinite().all()):
                return f"tensor {shown(name)} of {place} holds values that are no numbers"
    return ""


def _in_gguf(path: Path) -> Iterator[tuple[str, Path, Tensor]]:
    file = GgufFile(path)
    for name, place in file.header.tensors.items():
        if place.kind.name in KINDS:
            raw = file.raw(place).view(math.prod(place.shape[:-1]), -1)  # experts are many rows each
            for start, stop in spans((len(raw), place.shape[-1])):
                yield name, file.path_of(place), values_of(place.kind.name, raw[start:stop])


def _in_directory(directory: Path) -> Iterator[tuple[str, Path, Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            for name in names:
                tensor = file.get_tensor(name)
                if tensor.is_floating_point():
                    for values in tensor.flatten().split(VALUES_AT_ONCE):
                        yield name, path, values.to(torch.float32)
                elif name.endswith(SCALES) and tensor.dtype == torch.uint8:
                    yield name, path, tensor.float().where(tensor != NO_NUMBER, torch.nan)
