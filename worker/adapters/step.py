"""One step's additions: which of its rows have which adapter, and what that adds to each product of the decoder.

Rows of one adapter are multiplied together, wherever in the batch they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker.adapters.adapter import Adapter, Place
from worker.models.additions import Additions


class Spans(Protocol):
    """What is asked of a span here."""

    @property
    def adapter(self) -> Adapter | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


Groups = list[tuple[Adapter, list[int]]]


def groups_of(spans: Iterable[Spans]) -> Groups:
    """Each adapter with its rows, ascending; rows of the base are in no group."""
    rows: dict[Adapter, list[int]] = {}
    end = 0
    for span in spans:
        start, end = end, end + len(span.token_ids)
        if span.adapter is not None:
            rows.setdefault(span.adapter, []).extend(range(start, end))
    return list(rows.items())


class TorchAdditions:
    """For any device and type: two products a group and matrix."""

    def __init__(self, adapters: Sequence[Adapter], rows: Tensor, owners: Tensor) -> None:
        """``rows`` [num_rows] i64, and of each which of ``adapters`` it has, ascending; both on the device."""
        self._adapters, self._rows, self._owners = adapters, rows, owners
        present, counts = torch.unique_consecutive(owners, return_counts=True)
        parts = torch.split(rows, counts.tolist())
        self._groups = [(adapters[owner], own) for owner, own in zip(present.tolist(), parts, strict=True)]

    @classmethod
    def of(cls, groups: Groups, device: torch.device) -> TorchAdditions:
        pairs = [(row, owner) for owner, (_, rows) in enumerate(groups) for row in rows]
        rows, owners = torch.tensor(pairs, device=device).T
        return cls([adapter for adapter, _ in groups], rows, owners)

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See Additions."""
        for adapter, rows in self._groups:
            factors = adapter.factors.get((layer, place))
            if factors is None:
                continue
            own = x[rows]
            for factor in factors:
                delta = factor.of(own).to(y.dtype)
                y[:, factor.left : factor.left + delta.shape[1]].index_add_(0, rows, delta)

    def only(self, rows: Tensor, num_rows: int) -> Additions:
        """See Additions."""
        places = torch.full((num_rows,), -1, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        moved = places[self._rows]
        kept = moved >= 0
        return TorchAdditions(self._adapters, moved[kept], self._owners[kept])
