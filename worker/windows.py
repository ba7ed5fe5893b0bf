"""The pool that layers with windows have to themselves: which of its blocks goes with which of the other layers'.

A block of the other pool has at most one *companion* here: the same tokens, in those layers. A sequence uses the
companions of the window before its next token and of what it computes in a step, and lets go of them as its window
moves on. What nobody uses stays for whoever finds the block as part of a prefix, until its room is wanted, least
recently used first. So a prefix is of use up to where the window before its end still has companions.

The pool is large enough for the windows of all who may run, and for one step: nobody ever waits for a block of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.blocks import Pool
from worker.sequence import Sequence

NONE = -1


@dataclass(frozen=True, slots=True)
class Apart:
    """That pool, as a device has it."""

    num_blocks: int
    window: int
    """The tokens, its own among them, that a token looks back on in these layers at most."""
    companions: npt.NDArray[np.int64]
    """Of each block of the other pool, or NONE; where a step finds them."""


def num_blocks_for(num_sequences: int, window: int, max_step_tokens: int, block_size: int) -> int:
    """Enough for the windows of so many, each of which may begin and end within a block, and for a step's tokens."""
    return -(-(num_sequences * (window + 2 * block_size) + max_step_tokens) // block_size)


class Windows:
    """Every misuse is an AssertionError, as with the other pool."""

    def __init__(self, apart: Apart | None, pool: Pool, block_size: int) -> None:
        """``apart`` None: all layers are in ``pool``, and nothing here does anything."""
        self._pool, self._block_size = pool, block_size
        self._window = 0
        if apart is not None:
            self._window, self._companions = apart.window, apart.companions
            self._companions.fill(NONE)
            self._num_users = [0] * len(self._companions)
            self._free = list(range(apart.num_blocks))[::-1]
            self._idle: dict[int, None] = {}
            """Blocks whose companions nobody uses, the one let go first at the front."""

    def hold(self, sequence: Sequence, num_tokens: int = 0) -> None:
        """It uses the companions of the window before its next token, and of so many tokens from that one on; new ones
        where these are yet to be computed."""
        if self._window:
            num_computed = sequence.num_computed
            end = -(-(num_computed + num_tokens) // self._block_size)
            self._use_only(sequence, range(self._first(num_computed), end))

    def release(self, sequence: Sequence) -> None:
        """It uses none."""
        if self._window:
            self._use_only(sequence, range(0))

    def reach(self, block_ids: Run[int]) -> int:
        """Of these leading blocks of a table so many that the window behind them has its companions."""
        num_blocks = place = len(block_ids)
        while self._window and place > self._first(num_blocks * self._block_size):
            place -= 1
            if self._companions[block_ids[place]] == NONE:
                num_blocks = place
        return num_blocks

    def replace(self, sequence: Sequence, place: int, block_id: int) -> None:
        """A block of its table gives way to its equal, which takes over the companion if it has none itself."""
        if place not in sequence.companions:
            return
        own = sequence.block_ids[place]
        assert self._num_users[own] == 1, f"the companion of block {own} is written by several"
        companion = int(self._companions[own])
        self._companions[own], self._num_users[own] = NONE, 0
        if self._companions[block_id] == NONE:
            self._companions[block_id] = companion
        else:
            self._free.append(companion)
        self.use(block_id)

    def use(self, block_id: int) -> None:
        """One more user for its companion, which it has from now on."""
        if self._window:
            if self._companions[block_id] == NONE:
                if not self._free:
                    assert self._idle, "more windows are in use than there may be"
                    self._part(next(iter(self._idle)))
                self._companions[block_id] = self._free.pop()
            self._idle.pop(block_id, None)
            self._num_users[block_id] += 1

    def drop(self, block_id: int) -> None:
        """One user less; whoever could find the block finds the companion, too."""
        if self._window:
            assert self._num_users[block_id] > 0, f"the companion of block {block_id} is dropped more often than used"
            self._num_users[block_id] -= 1
            if not self._num_users[block_id]:
                self._idle[block_id] = None
                if not self._pool.is_named(block_id):
                    self._part(block_id)

    def audit(self, running: Run[Sequence]) -> None:
        """Check everything against all who run; O(blocks). Raises AssertionError."""
        if not self._window:
            return
        num_users = [0] * len(self._companions)
        for sequence in running:
            first, end = self._first(sequence.num_computed), -(-sequence.num_computed // self._block_size)
            assert not set(range(first, end)).difference(sequence.companions), "a window has lost its companions"
            for place in sequence.companions:
                num_users[sequence.block_ids[place]] += 1
        assert num_users == self._num_users, "users of companions differ from the tables"
        paired = self._companions != NONE
        idle = {block_id for block_id, num in enumerate(num_users) if paired[block_id] and not num}
        assert idle == self._idle.keys(), "a companion is lost, or idle and used"
        assert all(paired[block_id] for block_id, num in enumerate(num_users) if num), "a block has no companion"
        apart = sorted([*self._companions[paired].tolist(), *self._free])
        assert apart == list(range(len(apart))), "a companion is two blocks', or free and used"

    def _first(self, num_computed: int) -> int:
        """The place of the first block that the next token looks back on."""
        return max(0, num_computed - self._window + 1) // self._block_size

    def _use_only(self, sequence: Sequence, places: range) -> None:
        used, block_ids = sequence.companions, sequence.block_ids
        if places == used:
            return
        sequence.companions = places
        for place in used:
            if place not in places:
                self.drop(block_ids[place])
        for place in places:
            if place not in used:
                is_new = place * self._block_size >= sequence.num_computed
                assert is_new or self._companions[block_ids[place]] != NONE, "a window has lost its companions"
                self.use(block_ids[place])

    def _part(self, block_id: int) -> None:
        """Nobody uses its companion, which is free now."""
        del self._idle[block_id]
        self._free.append(int(self._companions[block_id]))
        self._companions[block_id] = NONE
