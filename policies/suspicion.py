"""Whose fault it may be that a worker was lost, and how whoever is suspected goes on.

A request that ends every worker that computes it would take its neighbours along each time, and nobody sees from
outside which of them it was. So all that were there are suspects until they get ahead of where they stood: a request
that ends workers does so at the same place again. The first loss may be anybody's and has no consequence. After the
second one a request goes on apart from other suspects, so that a third one is its own doing or that of somebody above
suspicion. After that it goes on alone, and if this worker is lost too, it was this request.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

Standing = Literal["free", "apart", "alone"]
"""free: beside anybody; apart: on a worker with no other suspect; alone: on a worker with nobody else."""

NUM_AHEAD = 32
"""Tokens of each sequence behind those that had come before the loss: more than a worker computes, guesses included,
before its gateway hears of them."""
APART_AT = 2
"""Losses."""
ALONE_AT = 3


class Suspicion(NamedTuple):
    """What speaks against one request."""

    num_losses: int = 0
    """Workers lost with it before it got ahead."""
    ahead_at: int = 0
    """Tokens, of all its sequences, with which it has got ahead."""

    def after_loss(self, num_tokens: int, num_sequences: int) -> Suspicion:
        """Another worker is lost with it when it has ``num_tokens``, and ``num_sequences`` are still open."""
        num_before = 0 if num_tokens >= self.ahead_at else self.num_losses
        return Suspicion(num_before + 1, num_tokens + NUM_AHEAD * num_sequences)

    def standing(self, num_tokens: int) -> Standing:
        """How it may go on, or goes on, with ``num_tokens``."""
        if self.num_losses < APART_AT or num_tokens >= self.ahead_at:
            return "free"
        return "apart" if self.num_losses < ALONE_AT else "alone"

    @property
    def is_proven(self) -> bool:
        """Nobody else was there when the last worker was lost."""
        return self.num_losses > ALONE_AT


def may_join(standing: Standing, num_there: int, suspects: Collection[Standing]) -> bool:
    """Whether a request may go to a worker that has ``num_there``, among them ``suspects``, none of which is free."""
    if "alone" in suspects:
        return False
    if standing == "alone":
        return num_there == 0
    return standing == "free" or not suspects
