"""What each sequence asks of a step: its claim, from its tokens, its blocks and what the prefix cache has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from policies.batching import Claim, Limits, Place
from worker.blocks import NO_PARENT, Pool
from worker.sequence import Sequence
from worker.windows import Windows

NUM_BLOCKS_WORTH_WAITING_FOR = 4
"""A prompt lets another one compute the beginning they share from this many blocks up; for less, a step's delay costs
more.
"""


def followers(sequence: Sequence) -> list[Sequence]:
    """Those of its request that have computed nothing yet."""
    live = sequence.request.live
    return [] if len(live) == 1 else [other for other in live if _is_follower(other, sequence)]


def _is_follower(other: Sequence, leader: Sequence) -> bool:
    return other is not leader and not other.has_output and not other.block_ids


def num_slots(sequence: Sequence, limits: Limits) -> int:
    """The places it takes, together with those who will fork from it."""
    if sequence.has_output or len(sequence.request.live) == 1:
        return 1
    return min(1 + len(followers(sequence)), limits.max_sequences)


def held_back(claim: Claim, sequence: Sequence) -> Claim:
    """Of one that is held up: behind its last token nothing can be drawn yet, so that one is left. Where it runs, and
    has nothing else to compute, nobody gives up blocks for it."""
    claim = claim._replace(num_pending=max(0, claim.num_pending - 1))
    if claim.num_pending or not sequence.block_ids:
        return claim
    return claim._replace(num_new_blocks=claim.num_new_blocks if sequence.may_share_tail else 0, is_idle=True)


class Claims:
    """The claims of one step after the other. ``begin``, then those who run in order, then some of those who wait."""

    def __init__(
        self, pool: Pool, windows: Windows, block_size: int, catch_up: Callable[[Sequence, list[int]], None]
    ) -> None:
        """``catch_up``: has a sequence step over blocks that another has filled with the same tokens since."""
        self._pool = pool
        self._windows = windows
        self._block_size = block_size
        self._catch_up = catch_up
        self._limits: Limits | None = None
        self._in_flight: dict[bytes, Place] = {}
        """A digest that a prompt is about to reach, and the first in order of those prompts."""
        self._tails: set[int] = set()
        """Shared blocks, partly filled, that the first of their users will write in once the others have copies."""
        self._led: set[str] = set()
        """Requests of which one is claimed for; the others will fork from it."""

    def begin(self, limits: Limits) -> None:
        """A step, with nothing claimed yet."""
        self._limits = limits
        self._in_flight.clear()
        self._tails.clear()
        self._led.clear()

    def are_plain(self, running: list[Sequence], limits: Limits) -> bool:
        """Whether there is nothing to plan while nobody waits: all write on, there is room for it, and nobody is more
        important, for whom another would pause."""
        return (
            0 < len(running) <= min(limits.max_sequences, limits.max_step_tokens)
            and running[0].place[0] == running[-1].place[0]
            and all(self._is_plain(sequence) for sequence in running)
        )

    def _is_plain(self, sequence: Sequence) -> bool:
        num_tokens = len(sequence.token_ids)
        return (
            num_tokens - sequence.num_computed == 1
            and num_tokens <= len(sequence.block_ids) * self._block_size
            and not sequence.may_share_tail
            and not sequence.is_complete
        )

    def of_running(self, sequence: Sequence) -> Claim:
        num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed
        if sequence.is_complete:
            return Claim(sequence.place, 0, start=num_computed)
        num_missing = -(-num_tokens // self._block_size) - len(sequence.block_ids)
        if num_tokens - num_computed > 1:
            if num_missing:
                return self._of_cut(sequence, num_missing)
            if num_computed // self._block_size == sequence.num_sealed:
                found = self._found(sequence, sequence.num_sealed)
                if found:
                    self._catch_up(sequence, found)
                    num_computed = sequence.num_computed
            num_pending = 0 if self._waits(sequence, num_computed) else num_tokens - num_computed
            return self._claim(sequence, num_pending, 0, num_computed)
        if sequence.may_share_tail and not num_missing:
            num_missing = self._num_copies(sequence)
        if sequence.request.leader is sequence:
            return self._claim(sequence, 1, num_missing, num_computed)
        return Claim(
            sequence.place,
            1,
            num_missing,
            1,
            0,
            num_computed,
            sequence.tenant,
            sequence.ttft_s,
            sequence.tpot_s,
            sequence.has_output,
            self._is_immune(sequence),
        )

    def of_waiting(self, sequence: Sequence) -> Claim | None:
        """None: it will fork from another of its request."""
        request = sequence.request
        if not sequence.has_output:
            if request.leader is not None or request.request_id in self._led:
                return None
            self._led.add(request.request_id)
        num_tokens = len(sequence.token_ids)
        sequence.hits = self._found(sequence, 0)
        num_found = len(sequence.hits) * self._block_size
        num_pending = 0 if self._waits(sequence, num_found) else num_tokens - num_found
        return self._claim(sequence, num_pending, -(-num_tokens // self._block_size), num_found)

    def freed(self, running: list[Sequence], order: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Of each in order what its going makes available once all before it are gone, and what it holds."""
        num_users: dict[int, int] = {}
        for index in order:
            num_freed, held = 0, running[index].held_block_ids
            for block_id in held:
                num_left = num_users.get(block_id, self._pool.num_users(block_id)) - 1
                num_users[block_id] = num_left
                num_freed += num_left == 0
            yield num_freed, len(held)

    def _of_cut(self, sequence: Sequence, num_missing: int) -> Claim:
        """It has lost its end; the cache may still have some of it."""
        num_blocks = len(sequence.block_ids)
        is_whole = sequence.num_sealed == num_blocks
        sequence.hits = self._found(sequence, num_blocks) if is_whole else []
        start = (num_blocks + len(sequence.hits)) * self._block_size if sequence.hits else sequence.num_computed
        return self._claim(sequence, len(sequence.token_ids) - start, num_missing, start)

    def _claim(self, sequence: Sequence, num_pending: int, num_new_blocks: int, start: int) -> Claim:
        assert self._limits is not None
        return Claim(
            place=sequence.place,
            num_pending=num_pending,
            num_new_blocks=num_new_blocks,
            num_slots=num_slots(sequence, self._limits),
            num_shared_blocks=sum(1 for block_id in sequence.hits if self._pool.num_users(block_id)),
            start=start,
            tenant=sequence.tenant,
            ttft_s=sequence.ttft_s,
            tpot_s=sequence.tpot_s,
            has_output=sequence.has_output,
            is_immune=self._is_immune(sequence),
            num_overtaken=sequence.num_overtaken,
            weight=sequence.weight,
        )

    def _is_immune(self, sequence: Sequence) -> bool:
        assert self._limits is not None
        return sequence.num_preemptions >= self._limits.max_preemptions

    def _found(self, sequence: Sequence, num_held: int) -> list[int]:
        """The cached blocks that go on behind its first ``num_held``, which have names, as far as they are of use."""
        chain = sequence.chain
        if chain is None:
            return []
        links = chain.extend(sequence.token_ids)
        held = sequence.block_ids[:num_held]
        parent = held[-1] if held else NO_PARENT
        found = self._pool.match(links, chain.key, (len(sequence.token_ids) - 1) // self._block_size, num_held, parent)
        return found[: max(0, self._windows.reach(held + found) - num_held)] if found else found

    def _waits(self, sequence: Sequence, num_computed: int) -> bool:
        """Whether one before it in order is computing the same next blocks; if not, others may wait for this one."""
        if sequence.chain is None:
            return False
        position = num_computed // self._block_size + NUM_BLOCKS_WORTH_WAITING_FOR - 1
        if position >= (len(sequence.token_ids) - 1) // self._block_size:
            return False
        # Equal digests are equal histories up to there; if by a collision they are not, it only waits a step.
        digest = sequence.chain.extend(sequence.token_ids)[position].digest
        first = self._in_flight.setdefault(digest, sequence.place)
        self._in_flight[digest] = min(first, sequence.place)
        return first < sequence.place

    def _num_copies(self, sequence: Sequence) -> int:
        """1 if it must copy its last block, partly filled, before it writes there; the first of those who share it
        need not.
        """
        tail = sequence.block_ids[-1]
        if self._pool.num_users(tail) == 1:
            sequence.may_share_tail = False
            return 0
        if tail in self._tails:
            return 1
        self._tails.add(tail)
        return 0
