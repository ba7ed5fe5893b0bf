"""What adapters add, by our own kernels, where they compute bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from worker.adapters.adapter import PLACES, Factor, Place
from worker.adapters.step import Groups
from worker.models import Architecture
from worker.native import MAX_FACTORS, Library, PackedAdapter

_PRODUCT = {place: index for index, place in enumerate(PLACES)}


def packed_adapter(factors: Mapping[tuple[int, Place], Sequence[Factor]], num_layers: int) -> PackedAdapter:
    """``factors`` in bfloat16 on the CPU."""
    products = {
        layer * len(PLACES) + _PRODUCT[place]: [(factor.down, factor.up, factor.left) for factor in parts]
        for (layer, place), parts in sorted(factors.items(), key=lambda item: (item[0][0], _PRODUCT[item[0][1]]))
    }
    return PackedAdapter(products, num_layers * len(PLACES))


class NativeAdditions:
    """One call a product, whatever the number of adapters."""

    def __init__(
        self,
        kernels: Library,
        adapters: list[PackedAdapter],
        addresses: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """``addresses`` [num_groups] i64 of the adapters; ``rows`` i32 of all of them, one behind the other, and how
        many of each: ``counts`` [num_groups] i64."""
        self._kernels, self._adapters, self._addresses = kernels, adapters, addresses
        self._rows, self._counts = rows, counts
        begins = rows.ctypes.data + rows.itemsize * (np.cumsum(counts) - counts)
        self.groups = torch.from_numpy(np.stack((addresses, begins, counts), axis=1))
        """As for Library.adapt; they lie where this does."""
        self.rank = max(adapter.rank for adapter in adapters)

    @staticmethod
    def serves(kernels: Library, architecture: Architecture, dtype: torch.dtype) -> bool:
        """Whether the kernels compute this type and these widths."""
        widths = (
            architecture.hidden_size,
            architecture.intermediate_size,
            architecture.num_heads * architecture.head_dim,
        )
        return kernels.has_adapt and dtype is torch.bfloat16 and all(width % 2 == 0 for width in widths)

    @classmethod
    def of(cls, groups: Groups, kernels: Library) -> NativeAdditions:
        """All of them packed."""
        adapters = [adapter.packed for adapter, _ in groups if adapter.packed is not None]
        addresses = np.array([adapter.address for adapter in adapters])
        rows = np.fromiter(chain.from_iterable(rows for _, rows in groups), dtype=np.int32)
        return cls(kernels, adapters, addresses, rows, np.array([len(rows) for _, rows in groups]))

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See Additions."""
        product = layer * len(PLACES) + _PRODUCT[place]
        self._kernels.adapt(self.groups, self.rank, product * MAX_FACTORS, x, y)

    def only(self, rows: Tensor, num_rows: int) -> NativeAdditions:
        """See Additions; ``rows`` ascend."""
        if len(rows) == num_rows:
            return self
        places = np.full(num_rows, -1, dtype=np.int32)
        places[rows.numpy()] = np.arange(len(rows), dtype=np.int32)
        moved = places[self._rows]
        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        counts = np.bincount(owners[moved >= 0], minlength=len(self._counts))
        return NativeAdditions(self._kernels, self._adapters, self._addresses, moved[moved >= 0], counts)
