"""Whether a worker has room for more: places in its batch, KV memory, and what may step back for the more important.

A worker is full when its batch is, or its memory. Whoever is more important than some of what it holds may still be
sent: the engine makes room. But each class keeps, of places and of memory, its guaranteed share of what it has there,
so that those who step back are some and never all.
"""

from __future__ import annotations

from collections.abc import Mapping

OVERCOMMIT = 16
"""A worker holds one sequence in this many beyond its batch: a place that falls free is taken in the next step."""
MAX_DISPLACED = 2
"""So many times what fits may be given to it when some of it steps back in the engine for what is more important."""


class Held:
    """What a worker was given for the classes of one priority and has not finished."""

    __slots__ = ("num_claimed_sequences", "num_claimed_tokens", "num_sequences", "num_tokens")

    def __init__(self) -> None:
        self.num_sequences = 0
        """Those that step back for the more important ones, as is their memory."""
        self.num_tokens = 0
        self.num_claimed_sequences = 0
        """Those that were sent on the guarantee and step back for nobody."""
        self.num_claimed_tokens = 0


class Room:
    """What one worker was given and has not finished. O(priorities) a question."""

    __slots__ = ("_ceiling", "_held", "_max_tokens", "_places", "_shares", "num_sequences", "num_tokens")

    def __init__(self, shares: Mapping[int, float], max_sequences: int, max_tokens: int) -> None:
        """``shares``: guaranteed to the classes of each priority together; ``max_sequences`` of the batch and
        ``max_tokens`` of the KV memory."""
        self._shares = shares
        self._places = max_sequences
        self._ceiling = max_sequences + max(1, max_sequences // OVERCOMMIT)
        self._max_tokens = max_tokens
        self._held: dict[int, Held] = {}
        self.num_sequences = 0
        self.num_tokens = 0
        """KV tokens that they have or are expected to come to."""

    def give(self, priority: int, own: int, num_sequences: int, num_tokens: int) -> None:
        """So many sequences more that hold, or are expected to hold, so many tokens together; negative: less. ``own``
        is the priority of their class, ``priority`` the one that they were sent with: smaller for those that went on
        their class's guarantee."""
        held = self._held.get(own)
        if held is None:
            held = self._held[own] = Held()
        if priority < own:
            held.num_claimed_sequences += num_sequences
            held.num_claimed_tokens += num_tokens
        else:
            held.num_sequences += num_sequences
            held.num_tokens += num_tokens
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens

    def has_room(self, priority: int, num_sequences: int, num_tokens: int, num_free_tokens: int | None = None) -> bool:
        """For such a request. One that would never fit beside others goes to a worker that has nothing else to do.
        ``num_free_tokens``: of its memory as it told, where that is more than what was given says."""
        if self.num_sequences == 0:
            return True
        num_free = max(self._max_tokens - self.num_tokens, num_free_tokens or 0)
        if self.num_sequences + num_sequences <= self._ceiling and num_tokens <= num_free:
            return True
        if self.num_sequences + num_sequences > MAX_DISPLACED * self._ceiling:
            return False
        return self._may_displace(priority, num_sequences, num_tokens)

    def _may_displace(self, priority: int, num_sequences: int, num_tokens: int) -> bool:
        """Whether it fits beside all that do not step back for it, and what the others keep."""
        is_less_important = False
        for other, held in self._held.items():
            num_sequences += held.num_claimed_sequences
            num_tokens += held.num_claimed_tokens
            if other <= priority:
                num_sequences += held.num_sequences
                num_tokens += held.num_tokens
            elif held.num_sequences:
                is_less_important = True
                share = self._shares.get(other, 0.0)
                # What was claimed is part of the guarantee already.
                num_kept = max(1, int(share * self._places)) - held.num_claimed_sequences
                num_kept_tokens = int(share * self._max_tokens) - held.num_claimed_tokens
                num_sequences += min(held.num_sequences, max(0, num_kept))
                num_tokens += min(held.num_tokens, max(0, num_kept_tokens))
        return is_less_important and num_sequences <= self._places and num_tokens <= self._max_tokens
