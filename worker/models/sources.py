"""Where a decoder's weights come from, by their names in a checkpoint without the leading "model."."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from worker.models.errors import ModelError
from worker.models.forms import Form, Plain
from worker.models.importers import Importer, Mxfp4
from worker.models.shard import Part, Shard
from worker.models.weights import Checkpoint

HEAD = "lm_head.weight"
_HEAD_MODULE = "lm_head"


class Source(Protocol):
    """One of them."""

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """In ``dtype``, None: the engine's type; on its device. ``shape`` is that of the whole, of which only the part
        is wanted. Raises ModelError, and ValueError where it would cut a group of codes."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """``name`` is that of the module, without ".weight"; a plain one is in the engine's type, and all are on its
        device. Raises ModelError."""
        ...

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """The same of an embedding whose ``table`` was taken as a tensor already, for a head that is tied to it."""
        ...


class PlainSource:
    """A Source that has nothing but floats, which cost nothing to make."""

    def __init__(self, take: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """``take``: name and shape to a tensor in the engine's type, on its device."""
        self._take = take

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        tensor = self._take(name, shape).to(dtype)
        return tensor if part is None else part.of(tensor)

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(self.tensor(f"{name}.weight", shape, part))

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(table)


class CheckpointSource:
    """The Source that a directory of safetensors is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        root: str,
        dtype: torch.dtype,
        device: torch.device,
        importer: Importer | None = None,
    ) -> None:
        """``root``: what the names of all tensors but the head's begin with; ``importer``: of what is quantised."""
        self._checkpoint, self._root, self._dtype, self.device = checkpoint, root, dtype, device
        self._importer = importer

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        name = self._whole_name(name)
        if isinstance(self._importer, Mxfp4):
            stack = self._importer.stack(self._checkpoint, name, shape, part, self._dtype)
            if stack is not None:
                return stack.to(self.device)
        return self._checkpoint.take(name, shape, part).to(self.device, dtype or self._dtype)

    def skip(self, name: str) -> None:
        """This tensor is had from elsewhere."""
        self._checkpoint.drop(self._whole_name(name))

    def _whole_name(self, name: str) -> str:
        return name if name == HEAD else self._root + name

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""
        if self._importer is not None:
            whole_name = name if name == _HEAD_MODULE else self._root + name
            whole = self._importer.matrix(self._checkpoint, whole_name, shape, self._dtype)
            if whole is not None:
                return (whole if part is None else part.of_form(whole)).to(self.device)
        return Plain(self.tensor(f"{name}.weight", shape, part))

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(table)


class ShardSource:
    """What one rank takes from the Source of the whole model, by its own names and shapes."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self._source, self._shard = source, shard

    def tensor(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        assert part is None
        name = self._shard.whole_name(name)
        with self._named(name):
            tensor = self._source.tensor(name, *self._shard.part(name, shape), dtype)
        is_bias = name.endswith((".bias", "_bias"))
        return torch.zeros_like(tensor) if is_bias and not self._shard.adds_bias(name) else tensor

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""
        assert part is None
        name = self._shard.whole_name(name)
        (num_rows, num_columns), own = self._shard.part(name, shape)
        with self._named(name):
            return self._source.matrix(name, (num_rows, num_columns), own)

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """See Source."""
        assert part is None
        whole, own = self._shard.part(name, shape)
        return self._source.tied(name, (whole[0], whole[1]), table, own)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """What cannot be cut is refused by this name."""
        try:
            yield
        except ValueError as error:
            num_ranks = self._shard.layout.tensor
            raise ModelError(f"matrix {name} cannot be shared among {num_ranks} ranks: {error}") from None
