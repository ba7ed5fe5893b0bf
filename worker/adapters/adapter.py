"""An adapter in memory: for each matrix of the decoder that it changes, two narrow ones whose product is added.

LoRA (Hu et al. 2021): y = W x + scale * B A x. A is ``down`` here, and ``up`` is B with the scale multiplied in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from worker.models.additions import PLACES, Place, Product
from worker.native import PackedAdapter

__all__ = ["PLACES", "Adapter", "Factor", "HeadFactor", "Place", "Product"]


@dataclass(frozen=True, slots=True)
class Factor:
    """What is added to some columns of one of the decoder's products."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank], scaled"""
    left: int
    """The first of the columns: queries, keys and values are one product of the decoder, and so are gate and up."""

    @property
    def rank(self) -> int:
        return self.down.shape[-2]

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def of(self, x: Tensor) -> Tensor:
        """x [num_rows, in] -> what is added, [num_rows, out]"""
        return (x @ self.down.T) @ self.up.T


@dataclass(frozen=True, slots=True)
class HeadFactor(Factor):
    """What is added to a product that each head has by itself: of ``down`` and ``up``, one is a matrix of all heads,
    and the other has one for each, [num_heads, ...].
    """

    num_heads: int

    def of(self, x: Tensor) -> Tensor:
        """See Factor."""
        heads = x.view(len(x), self.num_heads, -1).transpose(0, 1)
        return (heads @ self.down.mT @ self.up.mT).transpose(0, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Equal only to itself: a file that is loaded anew is another adapter."""

    adapter_id: str
    digest: str
    """Of its files."""
    rank: int
    """The largest."""
    factors: Mapping[tuple[int, Place], tuple[Factor, ...]]
    """By layer and place, of this rank's layers; none where it is packed."""
    num_bytes: int
    packed: PackedAdapter | None = None
    """For our own kernels."""
    number: int = 0
    """By which other ranks of the model know it; 0: there are none."""

    @cached_property
    def layers_of_experts(self) -> frozenset[int]:
        """In which it changes an expert's matrices, where it is not packed."""
        return frozenset(layer for layer, place in self.factors if isinstance(place, tuple))

    @property
    def changes_nothing(self) -> bool:
        """What it changes is on other ranks."""
        return self.packed is None and not self.factors
