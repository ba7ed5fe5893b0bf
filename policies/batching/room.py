"""Who is let in: whoever fits with all of its tokens beside one more block for every sequence that is there, and who
may put others aside.

Others are put aside only for a promise that is kept by it and would be broken without (pace.py), and only the less
important, or those of the same class who are due later, have not begun to write and can spare the time. Where places
are short they pause and keep what they hold; where memory is, they lose only what is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.batching.claims import Claim, Limits
from policies.batching.memory import Blocks, victims
from policies.batching.pace import Pace

MAX_PARKED = 2
"""So many times the places of the batch run at most, those counted who pause for want of one or lend theirs."""


def parked(running: Sequence[Claim], gone: Sequence[int], num_newcomers: int, max_sequences: int) -> set[int]:
    """Indices of those who have no place in this step. ``num_newcomers``: places that those just let in take."""
    num_over = sum([claim.num_taken_slots for claim in running]) + num_newcomers - max_sequences
    if num_over <= 0:
        return set()
    num_over -= sum([running[index].num_taken_slots for index in gone])
    found = set()
    for index in victims(running):
        if num_over <= 0:
            break
        if index not in gone and not running[index].is_idle:
            found.add(index)
            num_over -= running[index].num_slots
    return found


class Room:
    """Places and blocks while a step is planned."""

    def __init__(self, running: Sequence[Claim], blocks: Blocks, pace: Pace, limits: Limits) -> None:
        self.num_displacing = 0
        self.num_newcomer_slots = 0
        self._num_admitted = 0
        self._running = running
        self._blocks = blocks
        self._pace = pace
        self._max_sequences = limits.max_sequences
        self._num_slots = sum([claim.num_taken_slots for claim in running])
        """That those who run and those let in take."""
        self._num_lent = sum([claim.num_slots for claim in running]) - self._num_slots
        """That those who run have besides, and will want again."""
        self._num_taken_for_shared = 0
        self._short_at = running[min(blocks.denied)].place if blocks.denied else None
        self._has_displaced = False

    @property
    def is_closed(self) -> bool:
        """Nobody is let in in a step in which somebody has lost blocks for those who run."""
        return self._blocks.has_taken

    def may_fit(self, first_place: tuple[int, float, int]) -> bool:
        """Whether it is worth looking at those who wait at all."""
        running = self._running
        return self._num_slots < self._max_sequences or first_place < running[-1].place

    def is_out(self, index: int) -> bool:
        """Of those who run: it has lost blocks."""
        return self._blocks.is_out(index)

    def let_in(self, claim: Claim, ahead_s: float) -> bool:
        """Whether it fits, or has been made to; ``ahead_s`` as for ``Pace.would_save``."""
        if self._short_at is not None and self._short_at < claim.place:
            return False  # they have their blocks first
        blocks = self._blocks
        # A fork that finds no slot later waits like any other; a whole batch is all that can be asked for.
        num_slots = min(claim.num_slots, self._max_sequences)
        # What it would share may belong to those who have just been displaced: then nothing is taken for granted.
        num_shared = 0 if self._has_displaced else claim.num_shared_blocks
        num_others = len(self._running) - len(blocks.preempted) + self._num_admitted
        has_place = self._num_slots + num_slots <= self._max_sequences and self._may_run(num_slots)
        num_wanted = claim.num_new_blocks - num_shared + num_others
        if not (has_place and blocks.available >= num_wanted):
            if not (claim.num_pending and self._has_victims(claim) and self._pace.would_save(claim, ahead_s)):
                return False  # and nobody gives way to one who waits for another's beginning
            if not has_place and not self._can_park(claim, num_slots):
                return False
            if blocks.available < num_wanted:
                # What they free may be what newcomers before this one count on sharing: then it is free for nobody.
                num_for_shared = self._num_taken_for_shared
                num_wanted = claim.num_new_blocks + num_others + num_for_shared
                if not blocks.take(num_wanted, lambda index: self._may(claim, index), num_each=1):
                    return False
                blocks.available -= num_for_shared
                staying = [each for index, each in enumerate(self._running) if index not in blocks.preempted]
                self._num_slots = self.num_newcomer_slots + sum([each.num_taken_slots for each in staying])
                self._num_lent = sum([each.num_slots - each.num_taken_slots for each in staying])
                num_shared = self._num_taken_for_shared = 0
                self._has_displaced = True
            self.num_displacing += 1
        blocks.available -= claim.num_new_blocks - num_shared
        self._num_taken_for_shared += num_shared
        self._num_slots += num_slots
        self.num_newcomer_slots += num_slots
        self._num_admitted += 1
        return True

    def _has_victims(self, claim: Claim) -> bool:
        return bool(self._running) and self._may(claim, victims(self._running)[0])

    def _can_park(self, claim: Claim, num_slots: int) -> bool:
        if not self._may_run(num_slots):
            return False
        num_over = self._num_slots + num_slots - self._max_sequences
        for index in victims(self._running):
            if num_over <= 0 or not self._may(claim, index):
                break
            if index not in self._blocks.preempted:
                num_over -= self._running[index].num_taken_slots
        return num_over <= 0

    def _may_run(self, num_slots: int) -> bool:
        """So many more may, with a place in this step or without."""
        return self._num_slots + self._num_lent + num_slots <= MAX_PARKED * self._max_sequences

    def _may(self, claim: Claim, index: int) -> bool:
        """Whether this one may be put aside for the claim."""
        other = self._running[index]
        if other.is_immune or other.place < claim.place:
            return False
        if other.priority > claim.priority:
            return True
        if other.has_output or other.num_pending < 2 or other.ttft_s is None or claim.ttft_s is None:
            return False
        needed_s = self._pace.work_s(claim) + self._pace.work_s(other)
        return other.due_at - self._pace.now > 2.0 * needed_s
