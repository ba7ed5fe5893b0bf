"""The files of heads that were trained on a model."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from worker.models import ModelError


def tensors_of(directory: Path, names: tuple[str, str], what: str) -> dict[str, Tensor]:
    """By name, from the first of these files that is there: one of safetensors, one that torch wrote. Raises
    ModelError."""
    file = next((directory / name for name in names if (directory / name).is_file()), None)
    if file is None:
        raise ModelError(f"{what} {directory} have neither {names[0]} nor {names[1]}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{file} cannot be read: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{file} has something else than tensors by name")
    return tensors
