"""Who gets the KV blocks of a step, and who gives: first nobody grows who can wait, then the last in order lose their
ends, and only who has nothing left goes back among those who wait.

A sequence that has lost its end keeps the rest and its place in the batch, paused, and computes again no more than what
was taken. It has its blocks back when they fit beside one more for every other sequence, or when it is the first in
order, who takes from whomever it must: so somebody always moves.

Of those whom it may be taken from, the less important give first, and among equals the one whose tokens are computed
again in the least time for the blocks that they take: a prompt just begun holds much that was never computed, and short
histories are cheaper by the block than long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from policies.batching.claims import Claim

Freed = Callable[[Sequence[int]], Iterable[tuple[int, int]]]
"""From indices to the blocks that each one's going makes available once all before it there are gone, and to how many
it holds: what others hold as well it may keep."""

STEPS_ALIKE = 4
"""For each factor of two in what it takes to compute a block again: less of a difference is none."""


def victims(running: Sequence[Claim]) -> list[int]:
    """Indices in the order in which they give up their places: the last first, the immune after all others, and then
    the first, who does so only for one that comes before it."""
    some = [index for index in range(len(running) - 1, 0, -1) if not running[index].is_immune]
    if len(some) + 1 < len(running):
        some += [index for index in range(len(running) - 1, 0, -1) if running[index].is_immune]
    return [*some, 0]


class Blocks:
    """The blocks while a step is planned."""

    def __init__(
        self, running: Sequence[Claim], num_available: int, freed: Freed, again_s: Callable[[Claim], float]
    ) -> None:
        """``freed`` is asked only where blocks are short. ``again_s``: for each token that it holds, about what it
        takes to compute it again; 0: not known."""
        self.available = num_available
        self.grown: list[int] = []
        """Indices, as is everything here."""
        self.cuts: dict[int, int] = {}
        self.preempted: list[int] = []
        self.denied: set[int] = set()
        """Paused for want of blocks."""
        self._running = running
        self._freed, self._again_s = freed, again_s

    @property
    def has_taken(self) -> bool:
        """Somebody has lost blocks in this step."""
        return bool(self.cuts or self.preempted)

    def is_out(self, index: int) -> bool:
        """It has no part in this step: it has no blocks to write into."""
        return index in self.denied or index in self.cuts or index in self.preempted

    def grow(self, parked: set[int], can_wait: Callable[[int], bool]) -> None:
        """Each in order its new blocks. ``parked``: those who have no part in the step anyway; ``can_wait``: whether
        its promise lets it pass this step."""
        running = self._running
        for index, claim in enumerate(running):
            num_new = claim.num_new_blocks
            if not num_new or index in parked or self.is_out(index):
                continue
            if index and claim.num_pending > 1 and self.available - num_new < len(running) - 1:
                self.denied.add(index)
                continue
            if self.available < num_new and not self._take_for(index, num_new, can_wait):
                self.denied.add(index)
                continue
            self.available -= num_new
            self.grown.append(index)

    def take_back(self, paused: set[int]) -> None:
        """They do not compute in this step after all, and need not grow."""
        for index in paused.intersection(self.grown):
            self.grown.remove(index)
            self.available += self._running[index].num_new_blocks

    def _take_for(self, index: int, num_new: int, can_wait: Callable[[int], bool]) -> bool:
        running = self._running

        def may(other: int) -> bool:
            return other > index and (not index or not running[other].is_immune)

        if index and can_wait(index):
            own = running[index].priority
            if not any(may(other) and running[other].priority > own for other in self._left()):
                return False  # among equals nobody loses anything while there is time to wait for one who ends
        return self.take(num_new, may)

    def take(self, num_wanted: int, may: Callable[[int], bool], num_each: int = 0) -> bool:
        """Has so many available by taking from those who ``may`` be taken from, or changes nothing. With each that
        goes altogether, ``num_each`` fewer are wanted."""
        running = self._running
        order = self.preempted + sorted((index for index in self._left() if may(index)), key=self._rank)
        taken: list[tuple[int, int, bool]] = []
        available, wanted = self.available, num_wanted
        for index, (num_freed, num_held) in zip(order, self._freed(order), strict=True):
            if index in self.preempted:
                continue
            if available >= wanted:
                break
            num_left = num_freed - self.cuts.get(index, 0)
            taken.append((index, num_left, num_held > num_freed))
            available += num_left + (running[index].num_new_blocks if index in self.grown else 0)
            wanted -= num_each
        if available < wanted:
            return False
        for index, num_left, keeps_some in taken:
            if index in self.grown:
                self.grown.remove(index)
                self.available += running[index].num_new_blocks
            lack = num_wanted - self.available
            if lack <= 0:
                self.denied.add(index)
            elif num_left > lack or (num_left == lack and keeps_some):
                self.cuts[index] = self.cuts.get(index, 0) + lack
                self.available += lack
            else:
                self.cuts.pop(index, None)
                self.denied.discard(index)
                self.preempted.append(index)
                self.available += num_left
                num_wanted -= num_each
        return True

    def _left(self) -> Iterable[int]:
        """Those who still have something."""
        return (index for index in range(len(self._running)) if index not in self.preempted)

    def _rank(self, index: int) -> tuple[bool, bool, int, float, int]:
        """The least gives first; the first in order last of all."""
        claim = self._running[index]
        again_s = self._again_s(claim)
        steps = round(STEPS_ALIKE * math.log2(again_s)) if again_s > 0.0 else -math.inf
        return index == 0, claim.is_immune, -claim.priority, steps, -index
