"""Whether a worker has room for more: places in its batch, KV memory, and what may step back for the more important.

A worker is full when its batch is, or its memory; places that some of it lends count as free. Whoever is more important
than some of what it holds may still be sent: the engine makes room. But each class keeps, of places and of memory, its
guaranteed share of what it has there, so that those who step back are some and never all.

Where several gateways send to a worker, each has an equal part of it, in which it does as it would with a worker of its
own. Of what the worker tells that nobody uses, each may take an equal part besides until the next report, so a gateway
that is busy alone comes to nearly all of it and finds its way back to its own part as the others come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class Amount(NamedTuple):
    """Of a worker."""

    num_sequences: int
    num_tokens: int


class Room:
    """What one gateway gave to a worker and the worker has not finished. O(priorities) a question."""

    __slots__ = (
        "_all",
        "_ceiling",
        "_free",
        "_held",
        "_lent",
        "_max_tokens",
        "_num_gateways",
        "_places",
        "_shares",
        "_unseen",
        "_unseen_before",
        "num_sequences",
        "num_tokens",
    )

    def __init__(self, shares: Mapping[int, float], max_sequences: int, max_tokens: int, num_gateways: int = 1) -> None:
        """``shares``: guaranteed to the classes of each priority together; ``max_sequences`` of the batch and
        ``max_tokens`` of the KV memory, all of it; ``num_gateways`` that send there."""
        self._shares = shares
        self._all = Amount(max_sequences, max_tokens)
        self._held: dict[int, Held] = {}
        self._free: Amount | None = None
        """As reported, as is the next."""
        self._lent = 0
        """Places."""
        self._unseen = self._unseen_before = Amount(0, 0)
        """Given since the last report, and between it and the one before."""
        self.num_sequences = 0
        self.num_tokens = 0
        """KV tokens that they have or are expected to come to."""
        self._divide(num_gateways)

    def _divide(self, num_gateways: int) -> None:
        num_sequences, num_tokens = self._all
        self._num_gateways = num_gateways
        self._places = max(1, num_sequences // num_gateways)
        self._ceiling = max(1, (num_sequences + max(1, num_sequences // OVERCOMMIT)) // num_gateways)
        self._max_tokens = num_tokens // num_gateways

    def reported(self, num_gateways: int, free: Amount | None, num_idle: int = 0) -> None:
        """The worker has told how many send to it and what nobody uses; None: somebody waits there. What was given to
        it since the report before may not be in this one yet. ``num_idle`` of its sequences lend their places."""
        self._unseen_before, self._unseen = self._unseen, Amount(0, 0)
        self._free, self._lent = free, num_idle // max(1, num_gateways)
        if num_gateways != self._num_gateways:
            self._divide(max(1, num_gateways))

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
        if num_sequences > 0:
            unseen = self._unseen
            self._unseen = Amount(unseen.num_sequences + num_sequences, unseen.num_tokens + num_tokens)

    def has_room(self, priority: int, num_sequences: int, num_tokens: int) -> bool:
        """For such a request. One that would never fit beside others goes to a worker that has nothing else to do."""
        if self.num_sequences == 0:
            return True
        num_places = min(self._ceiling + self._lent, MAX_DISPLACED * self._ceiling) - self.num_sequences
        num_free_tokens = self._max_tokens - self.num_tokens
        if self._free is not None and (num_sequences > num_places or num_tokens > num_free_tokens):
            spare = self._spare(self._free)
            num_free_tokens = max(num_free_tokens, spare.num_tokens)
            if self._num_gateways > 1:
                num_places = max(num_places, spare.num_sequences)
        if num_sequences <= num_places and num_tokens <= num_free_tokens:
            return True
        if self.num_sequences + num_sequences > MAX_DISPLACED * self._ceiling:
            return False
        return self._may_displace(priority, num_sequences, num_tokens)

    def _spare(self, free: Amount) -> Amount:
        """This gateway's part of what was free, less what it has given since. Of places the last few are offered to
        each, as the parts of all would leave them empty."""
        num_gateways, unseen, before = self._num_gateways, self._unseen, self._unseen_before
        return Amount(
            -(-free.num_sequences // num_gateways) - unseen.num_sequences - before.num_sequences,
            free.num_tokens // num_gateways - unseen.num_tokens - before.num_tokens,
        )

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
