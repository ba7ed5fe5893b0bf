"""What adapters add, by our own kernels, where they compute bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def __init__(self, kernels: Library, rows: list[np.ndarray], adapters: list[PackedAdapter]) -> None:
        """``rows`` [num_rows] i32 of each adapter."""
        self._kernels, self._rows, self._adapters = kernels, rows, adapters
        groups = [(each.address, own.ctypes.data, len(own)) for each, own in zip(adapters, rows, strict=True)]
        self.groups = torch.tensor(groups, dtype=torch.int64)
        """As for Library.adapt; they lie where this does."""

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
        return cls(kernels, [np.array(rows, dtype=np.int32) for _, rows in groups], adapters)

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See Additions."""
        product = layer * len(PLACES) + _PRODUCT[place]
        self._kernels.adapt(self.groups, product * MAX_FACTORS, x, y)

    def only(self, rows: Tensor, num_rows: int) -> NativeAdditions:
        """See Additions."""
        places = np.full(num_rows, -1, dtype=np.int32)
        places[rows.numpy()] = np.arange(len(rows), dtype=np.int32)
        kept = [places[own] for own in self._rows]
        return NativeAdditions(self._kernels, [own[own >= 0] for own in kept], self._adapters)
