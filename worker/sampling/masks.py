"""Tokens that may not come next, a bit for each token of a row: applied after penalties and before anything is drawn.

A tile none of whose tokens may come is only looked at as far as its largest logit is concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.native import Library
from worker.triton import has_triton

BITS = 32


class Careful(Protocol):
    """Who knows more than a mask says."""

    def accepts(self, token_id: int, num_left: int) -> bool: ...

    def narrow(self, mask: npt.NDArray[np.int32], token_id: int) -> None: ...


class Judge(NamedTuple):
    """Of one row: has its token drawn again as long as it is not accepted."""

    guide: Careful
    num_left: int


@dataclass(frozen=True, slots=True)
class Masks:
    """Of some rows of a batch."""

    rows: list[int]
    bits: Tensor
    """[len(rows), words] i32 on the host: token t may come where bit t % 32 of word t // 32 is set. A row may have more
    words than its logits need."""
    judges: Sequence[Judge | None]
    """Of each of the rows."""
    ending: frozenset[int] = frozenset()
    """Rows of the batch that no token may follow but one that ends them, which their own wishes may forbid."""

    def apply(self, logits: Tensor, maxima: Tensor | None, kernels: Library | None) -> None:
        """In place: what may not come is at -inf. NaN and +inf stay. ``maxima``: as Library.maxima, kept true."""
        if kernels is not None:
            assert maxima is not None
            kernels.mask(logits, maxima, torch.tensor(self.rows), self.bits)
            return
        rows = torch.tensor(self.rows, device=logits.device)
        bits = self.bits.to(logits.device, non_blocking=True)
        if has_triton(logits.device):
            from worker.sampling.on_device import mask

            mask(logits, rows, bits)
            return
        places = torch.arange(BITS, dtype=torch.int32, device=logits.device)
        is_in = (bits[:, :, None] >> places & 1).flatten(1)[:, : logits.shape[1]].bool()
        own = logits[rows]
        logits[rows] = own.masked_fill(~is_in & (own < torch.inf), -torch.inf)

    def refused(self, token_ids: Sequence[int]) -> Masks | None:
        """Of the batch's tokens, those that their judges do not accept, with narrower masks; None: all will do."""
        places = [
            place
            for place, (row, judge) in enumerate(zip(self.rows, self.judges, strict=True))
            if judge is not None and token_ids[row] >= 0 and not judge.guide.accepts(token_ids[row], judge.num_left)
        ]
        if not places:
            return None
        bits = self.bits.numpy()[places]
        judges = [judge for place in places if (judge := self.judges[place]) is not None]
        rows = [self.rows[place] for place in places]
        for own, row, judge in zip(bits, rows, judges, strict=True):
            judge.guide.narrow(own, token_ids[row])
        return Masks(rows, torch.from_numpy(bits), judges)
