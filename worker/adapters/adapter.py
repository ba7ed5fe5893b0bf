"""An adapter in memory: for each matrix of the decoder that it changes, two narrow ones whose product is added.

LoRA (Hu et al. 2021): y = W x + scale * B A x. A is ``down`` here, and ``up`` is B with the scale multiplied in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.models.additions import PLACES, Place
from worker.native import PackedAdapter

__all__ = ["PLACES", "Adapter", "Factor", "Place"]


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
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


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

    @property
    def changes_nothing(self) -> bool:
        """What it changes is on other ranks."""
        return self.packed is None and not self.factors
