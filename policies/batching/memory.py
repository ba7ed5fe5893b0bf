"""Who gets the KV blocks of a step, and who gives: first nobody grows who can wait, then the last in order lose their
ends, and only who has nothing left goes back among those who wait.

A sequence that has lost its end keeps the rest and its place in the batch, paused, and computes again no more than what
was taken. It has its blocks back when they fit beside one more for every other sequence, or when it is the first in
order, who takes from whomever it must: so somebody always moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.batching.claims import Claim


def victims(running: Sequence[Claim]) -> list[int]:
    """Indices in the order in which they give way: the last first, the immune after all others, and then the first,
    who does so only for one that comes before it."""
    some = [index for index in range(len(running) - 1, 0, -1) if not running[index].is_immune]
    if len(some) + 1 < len(running):
        some += [index for index in range(len(running) - 1, 0, -1) if running[index].is_immune]
    return [*some, 0]


class Blocks:
    """The blocks while a step is planned."""

    def __init__(self, running: Sequence[Claim], num_available: int, freed: Callable[[], Sequence[int]]) -> None:
        """``freed``: by index, the blocks that a sequence's going makes available once all before it in ``victims``
        are gone; asked only where blocks are short."""
        self.available = num_available
        self.grown: list[int] = []
        """Indices, as is everything here."""
        self.cuts: dict[int, int] = {}
        self.preempted: list[int] = []
        self.denied: set[int] = set()
        """Paused for want of blocks."""
        self._running = running
        self._ask_freed = freed
        self._freed: Sequence[int] | None = None
        self._victims: list[int] = []
        self._next = 0

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
        if index and can_wait(index):
            last = self._first_victim()
            if last is None or running[last].priority <= running[index].priority:
                return False  # among equals nobody loses anything while there is time to wait for one who ends
        return self.take(num_new, lambda other: other > index and (not index or not running[other].is_immune))

    def _first_victim(self) -> int | None:
        chain = self._chain()
        return chain[self._next] if self._next < len(chain) else None

    def take(self, num_wanted: int, may: Callable[[int], bool], num_each: int = 0) -> bool:
        """Has so many available by taking from victims in order, as long as ``may``; or changes nothing. With each
        that goes altogether, ``num_each`` fewer are wanted."""
        chain, freed, running = self._chain(), self._freed_blocks(), self._running
        at, available, wanted = self._next, self.available, num_wanted
        while available < wanted:
            if at == len(chain) or not may(chain[at]):
                return False
            index = chain[at]
            available += self._left(index, freed) + (running[index].num_new_blocks if index in self.grown else 0)
            wanted -= num_each
            at += 1
        for index in chain[self._next : at]:
            if index in self.grown:
                self.grown.remove(index)
                self.available += running[index].num_new_blocks
            num_left = self._left(index, freed)
            lack = num_wanted - self.available
            if lack <= 0:
                self.denied.add(index)
            elif num_left > lack:
                self.cuts[index] = self.cuts.get(index, 0) + lack
                self.available += lack
            else:
                self.cuts.pop(index, None)
                self.denied.discard(index)
                self.preempted.append(index)
                self.available += num_left
                num_wanted -= num_each
                self._next += 1
        return True

    def _left(self, index: int, freed: Sequence[int]) -> int:
        return freed[index] - self.cuts.get(index, 0)

    def _chain(self) -> list[int]:
        if not self._victims:
            self._victims = victims(self._running)
        return self._victims

    def _freed_blocks(self) -> Sequence[int]:
        if self._freed is None:
            self._freed = self._ask_freed()
        return self._freed
