"""What is added to a decoder's products for some of a step's rows, as the decoder sees it."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

OfLayer = Literal["qkv", "output", "gate_up", "down"]
OfExperts = Literal["router", "shared_gate_up", "shared_down"]
OfLatent = Literal["compressed_queries", "queries", "compressed", "keys", "values"]
Product = OfLayer | OfExperts | OfLatent
"""The four products of a layer, those that one with experts has besides, and those of latent attention."""
Place = Product | tuple[Product, int]
"""A product of a layer, or of one of its experts."""
PLACES: tuple[OfLayer, ...] = ("qkv", "output", "gate_up", "down")


class Additions(Protocol):
    """Of one step."""

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """To y [num_rows, out], which the layer's own matrix has made of x [num_rows, in]; in place."""
        ...

    def rows_of_experts(self, layer: int) -> Tensor | None:
        """Rows [any] i64, each once, for which something is added to what an expert of this layer multiplies; None:
        there are none."""
        ...

    def only(self, rows: Tensor, num_rows: int) -> Additions:
        """For what is left when of ``num_rows`` rows only ``rows`` [num_left] i64 go on, in their order, each once."""
        ...

    def wanted(self, rows: Tensor, num_rows: int) -> Additions:
        """The same of the rows that the step wants something of, some perhaps twice: logits, and hidden states."""
        ...


class Grouped(Protocol):
    """As our own kernels take it."""

    @property
    def groups(self) -> Tensor:
        """As for Library.adapt; they lie where this does."""
        ...

    @property
    def rank(self) -> int:
        """The largest of their ranks."""
        ...

    def wanted(self, rows: Tensor, num_rows: int) -> Grouped:
        """As for Additions."""
        ...
