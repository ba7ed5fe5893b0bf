"""What a decoder asks of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.native import Library


@dataclass(frozen=True, slots=True)
class Means:
    """What matrices may be multiplied with."""

    kernels: Library | None = None
    """The compiled ones, which a matrix may be packed for."""
    rounds_inputs: bool = True
    """Inputs may be rounded where the matrix is."""
    is_repeatable: bool = False
    """A row's product has the same bits whichever rows come along, and however many."""
    codes: bool = True
    """Weights of bfloat16 may lie in twelve bits, see Library.code."""

    @property
    def may_code(self) -> bool:
        """The same; but with tiles few rows are added up in another order than many, which is not repeatable."""
        return self.codes and not (self.is_repeatable and self.kernels is not None and self.kernels.has_tiles)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix as it lies on a CUDA device, for ``worker.triton.streamed``."""

    codes: Tensor
    """[out, in]: weights, or codes of one byte."""
    float8: int = 0
    """How the codes are handed over, see ``worker.triton.float8``."""
    scales: Tensor | None = None
    """[out] f32, of codes."""
    bias: Tensor | None = None
    """[out]"""


class Linear(Protocol):
    """y = x @ weight.T + bias, however the weight is stored."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in] -> [num_tokens, out], in x's dtype."""
        ...

    def wide(self, x: Tensor) -> Tensor:
        """The same as float32."""
        ...
