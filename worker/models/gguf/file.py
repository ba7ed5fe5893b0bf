"""A GGUF file, or the parts of one, mapped rather than read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from policies import gguf
from sources import refuse_pipe
from worker.models.errors import ModelError


class GgufFile:
    """The header, and the bytes of each tensor; a mapping lives as long as a tensor over it does."""

    def __init__(self, path: Path) -> None:
        """``path``: of the first part, where it is in several. Raises ModelError."""
        self.path = path
        self.paths = gguf.parts_of(path)
        """Of all parts, in order."""
        maps = [_mapped(part) for part in self.paths]
        headers = [_parsed(part, mapped) for part, mapped in zip(self.paths, maps, strict=True)]
        try:
            self.header = gguf.joined(headers)
        except gguf.GgufInvalid as error:
            raise self.wrong(error) from None
        self._part_of = {name: number for number, header in enumerate(headers) for name in header.tensors}
        self._maps = maps

    def wrong(self, error: gguf.GgufInvalid) -> ModelError:
        return _unreadable(self.path, error)

    def path_of(self, place: gguf.TensorPlace) -> Path:
        """The part that it lies in."""
        return self.paths[self._part_of[place.name]]

    def raw(self, place: gguf.TensorPlace) -> Tensor:
        """[outermost dimension, bytes of each] uint8"""
        mapped = self._maps[self._part_of[place.name]]
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=place.num_bytes, offset=place.at)
        return raw.view(place.shape[0] if len(place.shape) > 1 else 1, -1)


def _mapped(path: Path) -> mmap.mmap:
    """Raises ModelError."""
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            # Private, so that torch may have it as writable memory; nobody writes.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read: {error}") from None


def _parsed(path: Path, mapped: mmap.mmap) -> gguf.Header:
    """Raises ModelError."""
    try:
        return gguf.parse(memoryview(mapped))
    except gguf.GgufInvalid as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: gguf.GgufInvalid) -> ModelError:
    return ModelError(f"{path} cannot be read as GGUF: {error}")
