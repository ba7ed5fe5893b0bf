"""One step's additions: which of its rows have which adapter, and what that adds to each product of the decoder.

Rows of one adapter are multiplied together, wherever in the batch they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.adapters.adapter import Adapter, Place
from worker.models.additions import Additions
from worker.transfer import sent


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
    """For any device and type: two products a group and matrix. Nothing waits for the device."""

    def __init__(self, groups: list[tuple[Adapter, Tensor]], wanted: list[tuple[Adapter, Tensor]]) -> None:
        """Adapters, each with its rows [any] i64, on the device; ``wanted``: among those that the step wants something
        of."""
        self._groups, self._wanted = groups, wanted

    @classmethod
    def of(cls, groups: Groups, device: torch.device, wanted: Sequence[int]) -> TorchAdditions:
        """``wanted``: the rows of the step that logits or hidden states are wanted of, in their order. One upload."""
        owners = {row: owner for owner, (_, rows) in enumerate(groups) for row in rows}
        moved: dict[tuple[int, int], list[int]] = {}
        times = Counter[int]()
        for place, row in enumerate(wanted):
            if row in owners:
                # One that is wanted for both does not keep itself company, which would show in its bits.
                moved.setdefault((owners[row], times[row]), []).append(place)
                times[row] += 1
        parts = [*(rows for _, rows in groups), *moved.values()]
        rows = sent(np.fromiter(chain.from_iterable(parts), dtype=np.int64), device)
        each = torch.split(rows, [len(part) for part in parts])
        num = len(groups)
        return cls(
            [(adapter, own) for (adapter, _), own in zip(groups, each[:num], strict=True)],
            [(groups[owner][0], own) for (owner, _), own in zip(moved, each[num:], strict=True)],
        )

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

    def rows_of_experts(self, layer: int) -> Tensor | None:
        """See Additions."""
        parts = [rows for adapter, rows in self._groups if layer in adapter.layers_of_experts]
        return torch.cat(parts) if parts else None

    def only(self, rows: Tensor, num_rows: int) -> Additions:
        """See Additions. The host waits for the device, which knows how many are left of each."""
        places = torch.full((num_rows,), -1, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        moved = [(adapter, places[own]) for adapter, own in self._groups]
        kept = [(adapter, own[own >= 0]) for adapter, own in moved]
        return TorchAdditions([pair for pair in kept if len(pair[1])], [])

    def wanted(self, rows: Tensor, num_rows: int) -> Additions:
        """See Additions."""
        return TorchAdditions(self._wanted, [])
