"""Where a decoder's weights come from, by their names in a checkpoint without the leading "model."."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from worker.models.errors import ModelError
from worker.models.fitting import Fit, Rows, eight_of, fitted
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

    def eight(self, name: str, form: Form, dtype: torch.dtype) -> Form:
        """A matrix that was taken, and is to be one with others of other forms: see ``eight_of``."""
        return eight_of(form, dtype)

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """The same of an embedding whose ``table`` was taken as a tensor already, for a head that is tied to it."""
        ...

    def experts(
        self, name: str, shape: tuple[int, int, int], outputs: Tensor, part: Part | None = None
    ) -> Iterator[Form]:
        """Of one tensor of all experts, ``shape`` [num_experts, in, out], each one's matrix in turn; its rows are
        these ``outputs`` of the part. Raises ModelError, and ValueError as ``tensor``."""
        for weight in self.tensor(name, shape, part):
            yield Plain(weight.T[outputs].contiguous())


class FileSource(Source, Protocol):
    """One over files, of which some matrices are rounded when they are read."""

    device: torch.device
    rounded: set[str]
    """The names of those that were: reading them again would take as long again."""

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
        """The matrix of this name, or that of all experts, is had from elsewhere. Raises ModelError."""
        ...


class PlainSource(Source):
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


class CheckpointSource(FileSource):
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
        self.rounded = set()

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

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
        """See FileSource."""
        if len(shape) == 3:
            for ending in ("", "_blocks", "_scales"):
                self._checkpoint.drop(f"{self._whole_name(name)}{ending}")
        elif self._imported(name, (shape[0], shape[1]), _left) is None:
            self._checkpoint.drop(self._whole_name(f"{name}.weight"))

    def matrix(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Form:
        """See Source."""

        def fit(shape: tuple[int, int], rows: Rows) -> Form:
            self.rounded.add(name)
            return fitted(shape, rows, self._dtype)

        whole = self._imported(name, shape, fit)
        if whole is not None:
            return (whole if part is None else part.of_form(whole)).to(self.device)
        return Plain(self.tensor(f"{name}.weight", shape, part))

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Plain:
        """See Source."""
        return Plain(table)

    def _imported(self, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """None where the matrix is one of floats."""
        if self._importer is None:
            return None
        return self._importer.matrix(self._checkpoint, self._whole_name(name), shape, fit)

    def _whole_name(self, name: str) -> str:
        return name if name in (HEAD, _HEAD_MODULE) else self._root + name


def _left(shape: tuple[int, int], rows: Rows) -> Form:
    """In place of ``fitted``, of a matrix that is had from elsewhere: its tensors are taken, and not unpacked."""
    return Plain(torch.empty(shape, device="meta"))


class ShardSource(Source):
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

    def eight(self, name: str, form: Form, dtype: torch.dtype) -> Form:
        """See Source."""
        return self._source.eight(self._shard.whole_name(name), form, dtype)

    def tied(self, name: str, shape: tuple[int, int], table: Tensor, part: Part | None = None) -> Form:
        """See Source."""
        assert part is None
        whole, own = self._shard.part(name, shape)
        return self._source.tied(name, (whole[0], whole[1]), table, own)

    def experts(
        self, name: str, shape: tuple[int, int, int], outputs: Tensor, part: Part | None = None
    ) -> Iterator[Form]:
        """See Source."""
        assert part is None
        name = self._shard.whole_name(name)
        (num_experts, num_inputs, num_outputs), own = self._shard.part(name, shape)
        with self._named(name):
            yield from self._source.experts(name, (num_experts, num_inputs, num_outputs), outputs, own)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """What cannot be cut is refused by this name."""
        try:
            yield
        except ValueError as error:
            num_ranks = self._shard.layout.tensor
            raise ModelError(f"matrix {name} cannot be shared among {num_ranks} ranks: {error}") from None
