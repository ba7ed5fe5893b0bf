"""What is kept of a sequence while its tokens are guessed: how its guesses went, and when it is looked at again."""

from __future__ import annotations

from typing import NamedTuple

from policies.speculation import Own
from worker.speculation.drafter import Draft

MIN_RESTING, MAX_RESTING = 2, 16
"""Once in so many steps a sequence is looked at for which there was long nothing, the more the larger the batch."""


class Taken(NamedTuple):
    """The draft that a sequence has in this step."""

    drafter: int
    strength: int


class Offer(NamedTuple):
    """A draft that a sequence may have, and what is expected of it."""

    value: float
    """Tokens that should turn out to be right."""
    drafter: int
    draft: Draft
    chances: list[float]


class Notes:
    """On one sequence."""

    __slots__ = ("num_vain", "off", "own", "rests_until", "taken")

    def __init__(self, own: list[Own]) -> None:
        self.own = own
        """By drafter."""
        self.off: set[int] = set()
        """Drafters that have raised for it."""
        self.taken: Taken | None = None
        self.num_vain = 0
        """Times in a row that there was nothing to draft, or nothing of it was right."""
        self.rests_until = 0
        """The step in which it is looked at again."""

    def vain(self, step: int, num_decodes: int) -> None:
        self.num_vain += 1
        most = min(MAX_RESTING, max(MIN_RESTING, num_decodes))
        self.rests_until = step + min(most, 1 << self.num_vain // 4)
