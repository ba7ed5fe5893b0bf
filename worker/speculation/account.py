"""What is known, and in hand, for guessing in batches of about one size: what does not pay among many may for one."""

from __future__ import annotations

from collections.abc import Sequence as Run

from policies.speculation import Effort, Purse
from worker.speculation.drafter import Drafter

NEVER = 1 << 62
MAX_DOUBLINGS = 6
"""A drafter that takes time, and was long not worth it, is considered anew once in 2 to the power of so many steps."""
DOUBT = 0.9
"""What is left, of the time that such a drafter is said to take, with each time in a row that it was not worth that."""


class Account:
    """The purse, the effort and the drafters' rests of one size of batch."""

    def __init__(self, num_requests: int, drafters: Run[Drafter]) -> None:
        """For batches of about so many."""
        self.purse, self.effort = Purse(num_requests), Effort()
        self._num_refused = [0] * len(drafters)
        """Times in a row."""
        self._rests_until = [NEVER if drafter.is_free else 0 for drafter in drafters]
        """The step in which it is considered again; of those that take no time: never."""

    def due(self, step: int) -> list[int]:
        """The drafters that take time, and are to be considered."""
        return [index for index, rests_until in enumerate(self._rests_until) if step >= rests_until]

    def next_due(self) -> int:
        """The step in which one is."""
        return min(self._rests_until)

    def believed(self, index: int) -> float:
        """The share, of what a drafter is said to take, that it is thought to: nobody has seen it for so long."""
        return DOUBT ** self._num_refused[index]

    def refuse(self, index: int, step: int) -> None:
        """It was not worth its time."""
        self._num_refused[index] += 1
        self._rests_until[index] = step + (1 << min(MAX_DOUBLINGS, self._num_refused[index]))

    def take(self, index: int) -> None:
        """It is asked."""
        self._num_refused[index] = 0
