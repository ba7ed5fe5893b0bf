"""What ranks that compute one model say to each other in the middle of a step, as the decoder sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """Ranks that share matrices call ``sum`` and ``gather`` alike and in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks that share this stage's matrices, in place; x is contiguous."""
        ...

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """columns [num_rows, own width] of all ranks that share the head, beside each other, on the first of them:
        [num_rows, sum of widths]; on the others [0, sum of widths]."""
        ...

    def send(self, x: Tensor) -> None:
        """To the next stage. x must not be written to afterwards."""
        ...

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """From the stage before."""
        ...


class Alone:
    """The Link of one rank that has the whole model."""

    def sum(self, x: Tensor) -> Tensor:
        """See Link."""
        return x

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """See Link."""
        return columns

    def send(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        raise AssertionError("there is no other stage")
