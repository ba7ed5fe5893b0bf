"""A GGUF file, mapped rather than read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from policies import gguf
from worker.models.errors import ModelError


class GgufFile:
    """The header, and the bytes of each tensor; the mapping lives as long as a tensor over it does."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path = path
        try:
            with path.open("rb") as file:
                # Private, so that torch may have it as writable memory; nobody writes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}") from None
        try:
            self.header = gguf.parse(memoryview(self._map))
        except gguf.GgufInvalid as error:
            raise self.wrong(error) from None
        if self.header.metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(f"{path} is one part of several; join them with llama.cpp's llama-gguf-split --merge")

    def wrong(self, error: gguf.GgufInvalid) -> ModelError:
        return ModelError(f"{self.path} cannot be read as GGUF: {error}")

    def raw(self, place: gguf.TensorPlace) -> Tensor:
        """[outermost dimension, bytes of each] uint8"""
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=place.num_bytes, offset=place.at)
        return raw.view(place.shape[0] if len(place.shape) > 1 else 1, -1)
