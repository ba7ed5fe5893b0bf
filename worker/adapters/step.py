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

    def __init__(self, groups: Iterable[tuple[Adapter, Tensor]]) -> None:
        """Each adapter with its rows, [num_rows] i64 on the device."""
        self._groups = list(groups)

    @classmethod
    def of(cls, groups: Groups, device: torch.device) -> TorchAdditions:
        return cls((adapter, torch.tensor(rows, device=device)) for adapter, rows in groups)

    def add(self, layer: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See Additions."""
        for adapter, rows in self._groups:
            factors = adapter.factors.get((layer, place))
            if factors is None:
                continue
            own = x[rows]
            for factor in factors:
                delta = (own @ factor.down.T) @ factor.up.T
                y[:, factor.left : factor.left + len(factor.up)].index_add_(0, rows, delta)

    def only(self, rows: Tensor, num_rows: int) -> Additions:
        """See Additions."""
        places = torch.full((num_rows,), -1, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        kept = [(adapter, places[own]) for adapter, own in self._groups]
        return TorchAdditions((adapter, own[own >= 0]) for adapter, own in kept)
