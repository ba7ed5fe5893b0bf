"""Tokens that may not come next, a bit for each token of a row: applied after penalties and before anything is drawn.

A tile none of whose tokens may come is only looked at as far as its largest logit is concerned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.transfer import sent
from worker.triton import has_triton

BITS = 32

Words = npt.NDArray[np.int32]


class Bits(NamedTuple):
    """Of one row: token t may come where bit t % 32 of word t // 32 is set."""

    words: Words
    """There may be more than its logits need."""
    address: int
    """Of the first; to ask numpy for it takes as long as to use it."""


class Check(Protocol):
    """Who knows more than the masks say, and looks at what was drawn by them."""

    def refused(self, ranked: Sequence[list[int]]) -> Masks | None:
        """``ranked``: of each row of the batch the token that was drawn, below 0 where there is none, and behind it
        those that would have come without it, as many as are known. Where one of them will do, or no choice is left, it
        is put first. The masks by which some rows are drawn again, each the mask of the row, or a narrower one; None:
        the first ones will do."""
        ...


@dataclass(slots=True)
class Masks:
    """Of some rows of a batch."""

    rows: list[int]
    bits: list[Bits]
    """Of each of them, all of one length."""
    check: Check | None = None
    """Of what is drawn by them, or without."""
    ending: frozenset[int] = frozenset()
    """Rows of the batch that no token may follow but one that ends them, which their own wishes may forbid."""
    forced: Mapping[int, int] = field(default_factory=dict)
    """Other rows, of which it is known that this token comes, whatever their logits are, if no NaN or +inf."""
    more: Sequence[int] = ()
    """Of what a check has refused: other rows, of which it wants to know what would have come without their tokens."""

    def addresses(self, rows: Sequence[int]) -> list[int]:
        """Of the bits of these; 0 where all tokens may come."""
        known = dict(zip(self.rows, [each.address for each in self.bits], strict=True))
        return [known.get(row, 0) for row in rows]

    def apply(self, logits: Tensor) -> None:
        """In place: what may not come is at -inf. NaN and +inf stay."""
        if not self.rows:
            return
        every = np.stack([each.words for each in self.bits])
        rows, bits = sent(np.array(self.rows), logits.device), sent(every, logits.device)
        if has_triton(logits.device):
            from worker.sampling.on_device import mask

            mask(logits, rows, bits)
            return
        places = torch.arange(BITS, dtype=torch.int32, device=logits.device)
        is_in = (bits[:, :, None] >> places & 1).flatten(1)[:, : logits.shape[1]].bool()
        own = logits[rows]
        logits[rows] = own.masked_fill(~is_in & (own < torch.inf), -torch.inf)
