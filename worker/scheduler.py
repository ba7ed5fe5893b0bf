"""Who computes what in this step: the queues, and the plan of policies/batching.py carried out on the block pool.

A sequence holds the blocks of all its known tokens from the moment it is admitted, so a prompt lies in one run and
never finds the pool empty half-way. Prompts that begin alike and come together are computed once: the later one waits
a step, and takes over the blocks that the earlier one has filled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from policies import batching
from policies.batching import Claim, Limits
from policies.costs import StepCosts
from worker.blocks import NO_PARENT, Pool
from worker.sequence import Sequence

NUM_BLOCKS_WORTH_WAITING_FOR = 4
"""A prompt lets another one compute the beginning they share from this many blocks up; for less, a step's delay costs
more.
"""

_order = attrgetter("order")


class Scheduler:
    """``waiting`` and ``running`` are in order; a waiting sequence holds no blocks. ``limits`` may change between
    steps.
    """

    def __init__(self, pool: Pool, block_size: int, limits: Limits, copy_block: Callable[[int, int], None]) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self.limits = limits
        self._copy_block = copy_block
        self._by_arrival: dict[int, Sequence] = {}
        self._in_flight: dict[bytes, tuple[int, int]] = {}
        """While a step is planned: a digest that a prompt is about to reach, and the first in order of those
        prompts.
        """
        self._tails: set[int] = set()
        """While a step is planned: shared blocks that the first of their users will write in once the others have
        copies.
        """

    def add(self, sequence: Sequence) -> None:
        """To the waiting ones."""
        self._by_arrival[sequence.arrival] = sequence
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, now: float) -> None:
        """It has ended, however: its blocks are available at once."""
        sequence.has_ended = True
        del self._by_arrival[sequence.arrival]
        if sequence.block_ids:
            self._take_from(self.running, sequence)
            self._release(sequence, now)
        else:
            self._take_from(self.waiting, sequence)
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        sequence.request.live.remove(sequence)

    def schedule(self, now: float, costs: StepCosts | None = None) -> list[tuple[Sequence, int]]:
        """The sequences of this step, each with a number of pending tokens; all blocks that they will write are theirs
        alone. ``costs`` as for batching.plan.
        """
        self._in_flight.clear()
        self._tails.clear()
        running = [self._claim(sequence) for sequence in self.running]
        may_displace = bool(self.waiting and self.running and self.waiting[0].priority < self.running[-1].priority)
        if may_displace or sum(claim.num_new_blocks for claim in running) > self._pool.num_available:
            running = self._with_freed(running)
        waiting: Iterable[Claim] = ()
        if self.waiting and (may_displace or sum(claim.num_slots for claim in running) < self.limits.max_sequences):
            waiting = self._waiting_claims()
        plan = batching.plan(
            running, waiting, self._pool.num_available, self.limits, costs, num_waiting=len(self.waiting)
        )
        by_arrival = self._by_arrival
        for arrival in plan.preempted:
            self.preempt(by_arrival[arrival], now)
        admitted = [by_arrival[arrival] for arrival in plan.admitted]
        for sequence in admitted:  # before anything is allocated, which may evict
            self._pool.acquire(sequence.hits)
        for sequence, claim in zip(self.running, running, strict=False):  # the preempted were the last
            if claim.num_new_blocks:
                self._grow(sequence, now)
        for sequence in admitted:
            self._admit(sequence, now)
        return [(by_arrival[arrival], num_tokens) for arrival, num_tokens in plan.grants]

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more are computed; blocks filled by known ones get their names."""
        sequence.num_computed += num_tokens
        chain, num_full = sequence.chain, min(sequence.num_computed, sequence.num_known) // self._block_size
        if chain is None or num_full == sequence.num_sealed:
            return
        links = chain.extend(sequence.known_token_ids)
        block_ids = sequence.block_ids
        for position in range(sequence.num_sealed, num_full):
            parent = block_ids[position - 1] if position else NO_PARENT
            sealed = self._pool.seal(block_ids[position], parent, links[position], chain.key)
            if sealed is None:
                sequence.chain = None
                return
            block_ids[position] = sealed
            sequence.num_sealed += 1

    def fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Those of its request that have waited for its prompt, now running beside it on the same blocks."""
        if leader.request.leader is not leader:
            return []
        forks = self._followers(leader)[: self._num_slots(leader) - 1]
        leader.request.leader = None
        for sequence in forks:
            self._take_from(self.waiting, sequence)
            self._pool.acquire(leader.block_ids)
            sequence.held(now)
            sequence.block_ids = list(leader.block_ids)
            sequence.num_computed = leader.num_computed
            sequence.num_sealed = leader.num_sealed
            sequence.chain = leader.chain.fork() if leader.chain else None
            sequence.num_cached_tokens = leader.num_cached_tokens
            sequence.started_at = leader.started_at
            sequence.may_share_tail = True
            insort(self.running, sequence, key=_order)
        leader.may_share_tail = bool(forks)
        return forks

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Back to its place among the waiting; what it computed is computed again, or found in the cache."""
        self._take_from(self.running, sequence)
        self._release(sequence, now)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.may_share_tail = False
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        insort(self.waiting, sequence, key=_order)

    def audit(self) -> None:
        """Every block and every queue entry accounted for. Raises AssertionError."""
        self._pool.audit(sequence.block_ids for sequence in self.running)
        assert not any(sequence.block_ids for sequence in self.waiting), "a waiting sequence holds blocks"
        queued = {sequence.arrival for sequence in self.waiting} | {sequence.arrival for sequence in self.running}
        assert queued == self._by_arrival.keys()
        assert len(queued) == len(self.waiting) + len(self.running)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_order), "a queue is out of order"

    # What each asks for

    def _claim(self, sequence: Sequence) -> Claim:
        if sequence.is_complete:
            return Claim(sequence.priority, sequence.arrival, 0, 0, start=sequence.num_computed)
        num_pending = len(sequence.token_ids) - sequence.num_computed
        if num_pending > 1:
            self._catch_up(sequence)
            num_pending = 0 if self._waits(sequence, sequence.num_computed) else sequence.num_pending
            num_slots = self._num_slots(sequence)
            return Claim(sequence.priority, sequence.arrival, num_pending, 0, 0, num_slots, start=sequence.num_computed)
        num_new_blocks = 1 if len(sequence.token_ids) > len(sequence.block_ids) * self._block_size else 0
        if sequence.may_share_tail and not num_new_blocks:
            num_new_blocks = self._num_copies(sequence)
        num_slots = 1 if sequence.request.leader is not sequence else self._num_slots(sequence)
        start = sequence.num_computed
        return Claim(sequence.priority, sequence.arrival, 1, num_new_blocks, 0, num_slots, start=start)

    def _waiting_claims(self) -> Iterator[Claim]:
        led = set()
        for sequence in self.waiting:
            request = sequence.request
            if not sequence.has_output:
                if request.leader is not None or request.request_id in led:
                    continue  # it will fork
                led.add(request.request_id)
            sequence.hits = []
            if sequence.chain is not None:
                links = sequence.chain.extend(sequence.token_ids)
                sequence.hits = self._pool.match(
                    links, sequence.chain.key, (len(sequence.token_ids) - 1) // self._block_size
                )
            num_found = len(sequence.hits) * self._block_size
            yield Claim(
                sequence.priority,
                sequence.arrival,
                0 if self._waits(sequence, num_found) else len(sequence.token_ids) - num_found,
                -(-len(sequence.token_ids) // self._block_size),
                num_slots=1 if sequence.has_output else self._num_slots(sequence),
                num_shared_blocks=sum(1 for block_id in sequence.hits if self._pool.num_users(block_id)),
                start=num_found,
            )

    def _waits(self, sequence: Sequence, num_computed: int) -> bool:
        """Whether one before it in order is computing the same next blocks; if not, others may wait for this one."""
        if sequence.chain is None:
            return False
        position = num_computed // self._block_size + NUM_BLOCKS_WORTH_WAITING_FOR - 1
        if position >= (len(sequence.token_ids) - 1) // self._block_size:
            return False
        # Equal digests are equal histories up to there; if by a collision they are not, it only waits a step.
        digest = sequence.chain.extend(sequence.token_ids)[position].digest
        first = self._in_flight.setdefault(digest, sequence.order)
        self._in_flight[digest] = min(first, sequence.order)
        return first < sequence.order

    def _with_freed(self, running: list[Claim]) -> list[Claim]:
        """The claims with what each preemption would make available, counted from the last."""
        num_users: dict[int, int] = {}
        claims = []
        for sequence, claim in zip(reversed(self.running), reversed(running), strict=True):
            num_freed = 0
            for block_id in sequence.block_ids:
                num_left = num_users.get(block_id, self._pool.num_users(block_id)) - 1
                num_users[block_id] = num_left
                num_freed += num_left == 0
            claims.append(claim._replace(num_freed_blocks=num_freed))
        return claims[::-1]

    # Carrying it out

    def _admit(self, sequence: Sequence, now: float) -> None:
        self._take_from(self.waiting, sequence)
        hits = sequence.hits
        num_missing = -(-len(sequence.token_ids) // self._block_size) - len(hits)
        sequence.held(now)
        sequence.block_ids = hits + self._pool.allocate(num_missing, hits[-1] if hits else NO_PARENT)
        sequence.hits = []
        sequence.num_sealed = len(hits)
        sequence.num_computed = len(hits) * self._block_size
        if sequence.started_at is None:
            sequence.started_at = now
            self._credit(sequence, sequence.num_computed)
        if not sequence.has_output and self._followers(sequence):
            sequence.request.leader = sequence
        insort(self.running, sequence, key=_order)

    def _grow(self, sequence: Sequence, now: float) -> None:
        """One block more to write the next token in: a new one, or a copy of a tail that others still read."""
        block_ids = sequence.block_ids
        if len(sequence.token_ids) > len(block_ids) * self._block_size:
            sequence.held(now)
            block_ids += self._pool.allocate(1, block_ids[-1])
        else:
            shared = block_ids[-1]
            (own,) = self._pool.allocate(1, block_ids[-2] if len(block_ids) > 1 else NO_PARENT)
            self._copy_block(shared, own)
            self._pool.release((shared,))
            block_ids[-1] = own
        sequence.may_share_tail = False

    def _catch_up(self, sequence: Sequence) -> None:
        """Step over blocks that another sequence has filled with the same tokens since."""
        chain, size = sequence.chain, self._block_size
        if chain is None or sequence.num_computed // size != sequence.num_sealed:
            return
        links = chain.extend(sequence.token_ids)
        block_ids = sequence.block_ids
        for position in range(sequence.num_sealed, (len(sequence.token_ids) - 1) // size):
            parent = block_ids[position - 1] if position else NO_PARENT
            found = self._pool.find(links[position], parent, chain.key)
            if found is None:
                break
            self._pool.acquire((found,))
            self._pool.release((block_ids[position],))
            block_ids[position] = found
            sequence.num_sealed = position + 1
            if sequence.num_preemptions == 0:
                self._credit(sequence, (position + 1) * size - sequence.num_computed)
            sequence.num_computed = (position + 1) * size

    # Small things

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

    def _followers(self, sequence: Sequence) -> list[Sequence]:
        """Those of its request that have computed nothing yet."""
        live = sequence.request.live
        return [] if len(live) == 1 else [other for other in live if self._is_follower(other, sequence)]

    @staticmethod
    def _is_follower(other: Sequence, leader: Sequence) -> bool:
        return other is not leader and not other.has_output and not other.block_ids

    def _num_slots(self, sequence: Sequence) -> int:
        """The places it takes, together with those who will fork from it."""
        if sequence.has_output or len(sequence.request.live) == 1:
            return 1
        return min(1 + len(self._followers(sequence)), self.limits.max_sequences)

    def _credit(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt tokens found rather than computed."""
        sequence.num_cached_tokens += num_tokens
        self.num_cached_tokens += num_tokens

    def _release(self, sequence: Sequence, now: float) -> None:
        sequence.held(now)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []

    @staticmethod
    def _take_from(queue: list[Sequence], sequence: Sequence) -> None:
        position = bisect_left(queue, sequence.order, key=_order)
        assert queue[position] is sequence, "a sequence is not where its order puts it"
        del queue[position]
