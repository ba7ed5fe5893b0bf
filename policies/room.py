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


class Room:
    """What one worker was given and has not finished. O(priorities) a question."""

    __slots__ = ("_ceiling", "_max_tokens", "_num_sequences", "_num_tokens", "_places", "_shares", "_tokens")

    def __init__(self, shares: Mapping[int, float], max_sequences: int, max_tokens: int) -> None:
        """``shares``: guaranteed to the classes of each priority together; ``max_sequences`` of the batch and
        ``max_tokens`` of the KV memory."""
        self._shares = shares
        self._places = max_sequences
        self._ceiling = max_sequences + max(1, max_sequences // OVERCOMMIT)
        self._max_tokens = max_tokens
        self._num_sequences: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}
        self._tokens = 0

    @property
    def num_tokens(self) -> int:
        """KV tokens that it was given and expects."""
        return self._tokens

    def give(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        """So many sequences more that hold, or are expected to hold, so many tokens together; negative: less."""
        self._num_sequences[priority] = self._num_sequences.get(priority, 0) + num_sequences
        self._num_tokens[priority] = self._num_tokens.get(priority, 0) + num_tokens
        self._tokens += num_tokens

    def has_room(self, priority: int, num_sequences: int, num_tokens: int, num_free_tokens: int | None = None) -> bool:
        """For such a request. One that would never fit beside others goes to a worker that has nothing else to do.
        ``num_free_tokens``: of its memory as it told, where that is more than what was given says."""
        num_held = sum(self._num_sequences.values())
        if num_held == 0:
            return True
        num_free = max(self._max_tokens - self._tokens, num_free_tokens or 0)
        if num_held + num_sequences <= self._ceiling and num_tokens <= num_free:
            return True
        return num_held + num_sequences <= MAX_DISPLACED * self._ceiling and self._may_displace(
            priority, num_sequences, num_tokens
        )

    def _may_displace(self, priority: int, num_sequences: int, num_tokens: int) -> bool:
        is_less_important = False
        for other, num_held in self._num_sequences.items():
            if not num_held:
                continue
            if other <= priority:
                num_sequences += num_held
                num_tokens += self._num_tokens[other]
            else:
                is_less_important = True
                share = self._shares.get(other, 0.0)
                num_sequences += min(num_held, max(1, int(share * self._places)))
                num_tokens += min(self._num_tokens[other], int(share * self._max_tokens))
        return is_less_important and num_sequences <= self._places and num_tokens <= self._max_tokens
