"""What adapters add, by our own kernels, where they compute bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from worker.adapters.adapter import PLACES, Factor, Place
from worker.adapters.step import Groups
from worker.models.architecture import Architecture, Mixture
from worker.native import MAX_FACTORS, Library, PackedAdapter


@cache
def numbers_of(mixture: Mixture | None) -> dict[Place, int]:
    """By which the kernels know a layer's products; those of a whole step are the first."""
    places: list[Place] = [*PLACES]
    if mixture is not None:
        places += ["router", "shared_gate_up", "shared_down"]
        for expert in range(mixture.num_experts):
            places += [("gate_up", expert), ("down", expert)]
    return {place: number for number, place in enumerate(places)}


def packed_adapter(factors: Mapping[tuple[int, Place], Sequence[Factor]], architecture: Architecture) -> PackedAdapter:
    """``factors`` in bfloat16 on the CPU."""
    numbers = numbers_of(architecture.mixture)
    products = {
        layer * len(numbers) + numbers[place]: [(factor.down, factor.up, factor.left) for factor in parts]
        for (layer, place), parts in factors.items()
    }
    return PackedAdapter(dict(sorted(products.items())), architecture.num_layers * len(numbers))


class NativeAdditions:
    """One call a product, whatever the number of adapters."""

    def __init__(
        self,
        kernels: Library,
        adapters: list[PackedAdapter],
        addresses: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray,
        numbers: Mapping[Place, int],
    ) -> None:
        """``addresses`` [num_groups] i64 of the adapters; ``rows`` i32 of all of them, one behind the other, and how
        many of each: ``counts`` [num_groups] i64; ``numbers``: see numbers_of."""
        self._kernels, self._adapters, self._addresses, self._numbers = kernels, adapters, addresses, numbers
        self._rows, self._counts = rows, counts
        begins = rows.ctypes.data + rows.itemsize * (np.cumsum(counts) - counts)
        self.groups = torch.from_numpy(np.stack((addresses, begins, counts), axis=1))
        """As for Library.adapt; they lie where this does."""
        self.rank = max(adapter.rank for adapter in adapters)

    @staticmethod
    def serves(kernels: Library, architecture: Architecture, dtype: torch.dtype) -> bool:
        """Whether the kernels compute this type and these widths; they know nothing of latent attention."""
        widths = (
            architecture.hidden_size,
            architecture.intermediate_size,
            architecture.num_heads * architecture.head_dim,
        )
        is_known = architecture.latent is None and dtype is torch.bfloat16
        return kernels.has_adapt and is_known and all(width % 2 == 0 for width in widths)

    @classmethod
    def of(cls, groups: Groups, kernels: Library, architecture: Architecture) -> NativeAdditions:
        """All of them packed, for this architecture."""
        adapters = [adapter.packed for adapter, _ in groups if adapter.packed is not None]
        addresses = np.array([adapter.address for adapter in adapters])
        rows = np.fromiter(chain.from_iterable(rows for _, rows in groups), dtype=np.int32)
        counts = np.array([len(rows) for _, rows in groups])
        return cls(kernels, adapters, addresses, rows, counts, numbers_of(architecture.mixture))

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See Additions."""
        if not len(self._rows):
            return
        first = (layer * len(self._numbers) + self._numbers[place]) * MAX_FACTORS
        if y.dtype is x.dtype:
            self._kernels.adapt(self.groups, self.rank, first, x, y)
        else:
            added = torch.zeros_like(y, dtype=x.dtype)
            self._kernels.adapt(self.groups, self.rank, first, x, added)
            y += added

    def rows_of_experts(self, layer: int) -> Tensor | None:
        """See Additions; not told apart, as on the CPU experts are multiplied one after another anyhow."""
        return torch.from_numpy(self._rows).long() if len(self._rows) else None

    def only(self, rows: Tensor, num_rows: int) -> NativeAdditions:
        """See Additions."""
        return self.wanted(rows, num_rows)

    def wanted(self, rows: Tensor, num_rows: int) -> NativeAdditions:
        """See Additions."""
        left = rows.numpy()
        if len(left) == num_rows and np.array_equal(left, np.arange(num_rows)):
            return self
        num_groups = len(self._counts)
        owners = np.full(num_rows, num_groups)
        owners[self._rows] = np.repeat(np.arange(num_groups), self._counts)
        own = owners[left]
        counts = np.bincount(own, minlength=num_groups)[:num_groups]
        moved = np.argsort(own, kind="stable")[: counts.sum()].astype(np.int32)
        return NativeAdditions(self._kernels, self._adapters, self._addresses, moved, counts, self._numbers)
