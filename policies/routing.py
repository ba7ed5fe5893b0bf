"""Which worker gets the next request: the longest cached prefix weighed against the work already given to each.

A worker tells the gateway which full KV blocks it keeps, by digest (policies/prefix.py); the gateway names the blocks
of a prompt in the same way and counts how many of them each worker has. ``PrefixIndex`` is what is known of one worker,
``choose`` the decision. It goes where the first token should come soonest: to compute what is missing here, after what
was given to it before, against the same there (the idea of Mooncake's conductor, FAST '25, section 6). What many
requests begin with at once is computed for all of them, so it soon lies with as many workers as they keep busy. Digests
are keyed with the tenant's salt, so nobody is sent anywhere because of what a stranger asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

COPY_WEIGHT = 4.0
"""A token computed where another worker holds it costs so many: its time, and room in a second cache for what the
first one keeps already. Those who share it bear that together. Measured in benchmarks/routing.md."""

SEQUENCE_WEIGHT = 128.0
"""Tokens of work that an open sequence counts as: it takes its part of each step that computes the prompt."""


class PrefixIndex:
    """The blocks that one worker holds, as far as it told, and those it was given to compute.

    ``match`` takes O(log blocks of the prompt), everything else O(1) a block. Every ancestor of a held block is held:
    a worker gives up children before parents. So what it holds of a prompt is a prefix of its chain.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: of the worker's pool; it cannot hold more."""
        self._max_blocks = max_blocks
        self._held: set[bytes] = set()
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._held)

    def update(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> bool:
        """What changed since it last told; False when it claims more blocks than it has, and is not to be believed."""
        self._held.difference_update(evicted)
        self._held.update(stored)
        return len(self._held) <= self._max_blocks

    def expect(self, digests: Iterable[bytes]) -> None:
        """A request with these blocks was sent there; until ``forget`` they count as held."""
        expected = self._expected
        for digest in digests:
            expected[digest] = expected.get(digest, 0) + 1

    def forget(self, digests: Iterable[bytes]) -> None:
        """That request has left; what it computed the worker has told, or will."""
        expected = self._expected
        for digest in digests:
            num_left = expected[digest] - 1
            if num_left:
                expected[digest] = num_left
            else:
                del expected[digest]

    def num_expecting(self, digest: bytes) -> int:
        """Requests that were sent there with this block and have not left."""
        return self._expected.get(digest, 0)

    def match(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks, from the first, it holds or is about to."""
        held, expected = self._held, self._expected
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in held or digests[middle] in expected:
                low = middle + 1
            else:
                high = middle
        return low


class Candidate(NamedTuple):
    """A worker with room for the request."""

    num_matched_tokens: int
    """Of its prompt, those that need no computing there."""
    num_pending_tokens: int
    """Prompt tokens given to it that no first token has shown to be computed; they come before this request's."""
    num_sequences: int = 0
    """Open there: each takes its part of every step."""
    num_given_tokens: int = 0
    """Prompt tokens given to it to compute since it joined: of workers alike, the one that had less goes on."""
    num_sharing: int = 0
    """Requests there, not over yet, whose prompts begin with all that is matched of this one."""


def choose(num_prompt_tokens: int, candidates: Sequence[Candidate]) -> int:
    """The index of the worker that should compute it; ``candidates`` is not empty."""
    best_matched = max(candidate.num_matched_tokens for candidate in candidates)
    num_sharing = max(each.num_sharing for each in candidates if each.num_matched_tokens == best_matched)

    def price(candidate: Candidate) -> tuple[float, int]:
        copies = COPY_WEIGHT * (best_matched - candidate.num_matched_tokens) / max(1, num_sharing)
        work = candidate.num_pending_tokens + SEQUENCE_WEIGHT * candidate.num_sequences
        return num_prompt_tokens - best_matched + work + copies, candidate.num_given_tokens

    return min(range(len(candidates)), key=lambda index: price(candidates[index]))
