"""Who computes what in this step: the queues, and the plan of policies/batching carried out on the block pool.

A sequence holds the blocks of all its known tokens from the moment it is admitted, so a prompt lies in one run and
never finds the pool empty half-way; only one that had to give up its end has fewer, and stands still meanwhile. Prompts
that begin alike and come together are computed once: the later one waits a step, and takes over the blocks that the
earlier one has filled.

Where every layer has a window, a sequence lets go of the blocks that lie before all of them each time that it takes a
new one. What has a name goes at once or not at all, since whoever uses a block uses its ancestors; so that this is
soon, only the prompt's blocks and those of the first window get names. Where only some layers have windows, what these
need lies in a pool apart (``worker.windows``), and what was computed is of use as far as their windows reach there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from policies import batching
from policies.batching import Limits, Plan, Turns, raised
from policies.costs import StepCosts
from worker.blocks import NO_PARENT, Pool
from worker.claims import Claims, followers, num_slots
from worker.sequence import Sequence
from worker.windows import Apart, Windows

AGE_EVERY_S = 1.0
"""How often it is looked whether somebody has waited too long."""

_place = attrgetter("place")


class Scheduler:
    """``waiting`` and ``running`` are in order; a waiting sequence holds no blocks. ``limits`` may change between
    steps."""

    def __init__(
        self,
        pool: Pool,
        block_size: int,
        limits: Limits,
        copy_block: Callable[[int, int], None],
        window: int = 0,
        apart: Apart | None = None,
    ) -> None:
        """``window``: the tokens, its own among them, that a token looks back on in any layer; 0: all. ``apart``: the
        pool of layers that have windows where others have none."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        """Of sequences that lost all their blocks."""
        self.num_tail_frees = 0
        """Of those that lost the last ones."""
        self.num_displacements = 0
        """Those let in for whom others were put aside."""
        self.num_paused = 0
        """Of those running: had no part in the last step, though they could have."""
        self.num_cached_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self.limits = limits
        self._copy_block = copy_block
        self._window = window
        self._by_arrival: dict[int, Sequence] = {}
        self._windows = Windows(apart, pool, block_size)
        self._claims = Claims(pool, self._windows, block_size, self._catch_up)
        self._turns = Turns()
        self._ages_at = 0.0

    def add(self, sequence: Sequence) -> None:
        """To the waiting ones."""
        self._by_arrival[sequence.arrival] = sequence
        insort(self.waiting, sequence, key=_place)

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
        alone. ``costs`` as for batching.plan."""
        if now >= self._ages_at:
            self._age(now)
        if self.waiting or not self._claims.are_plain(self.running, self.limits):
            return self._planned(now, costs)
        self.num_paused = 0
        for sequence in self.running:
            self._windows.hold(sequence, 1)
        return [(sequence, 1) for sequence in self.running]

    def _planned(self, now: float, costs: StepCosts | None) -> list[tuple[Sequence, int]]:
        of_running, running, waiting = self._claims.of_running, self.running, self.waiting
        self._claims.begin(self.limits)
        claims = [of_running(sequence) for sequence in running]
        prompts = [claim for claim in claims if claim.num_pending > 1]
        if waiting or prompts:
            self._turns.begin({claim.tenant for claim in prompts} | {each.tenant for each in waiting})
        plan = batching.plan(
            claims,
            waiting,
            self._pool.num_available,
            self.limits,
            claim=self._claims.of_waiting,
            freed=lambda order: self._claims.freed(running, order),
            due=lambda index: running[index].token_due_at,
            costs=costs,
            turns=self._turns,
            now=now,
        )
        self._carry_out(plan, now)
        grants = [(self._by_arrival[arrival], num_tokens) for arrival, num_tokens in plan.grants]
        self._take_tails(grants, now)
        self.num_paused = len(plan.paused)
        for sequence, num_tokens in grants:
            self._windows.hold(sequence, num_tokens)
            if num_tokens > 1:
                self._turns.charge(sequence.tenant, num_tokens, sequence.num_computed, costs, sequence.weight)
        return grants

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more are computed; blocks filled by known ones get their names."""
        sequence.num_computed += num_tokens
        self._seal(sequence)
        self._windows.hold(sequence, len(sequence.draft_token_ids))

    def _seal(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_computed, sequence.num_known)
        if self._window:
            num_tokens = min(num_tokens, max(sequence.num_prompt_tokens, self._window))
        chain, num_full = sequence.chain, num_tokens // self._block_size
        if chain is None or num_full <= sequence.num_sealed:
            return
        links = chain.extend(sequence.known_token_ids)
        block_ids = sequence.block_ids
        for position in range(sequence.num_sealed, num_full):
            parent = block_ids[position - 1] if position else NO_PARENT
            sealed = self._pool.seal(block_ids[position], parent, links[position], chain.key)
            if sealed is None:
                sequence.chain = None
                return
            if sealed != block_ids[position]:
                self._windows.replace(sequence, position, sealed)
                block_ids[position] = sealed
            sequence.num_sealed += 1

    def make_room(self, sequence: Sequence, num_tokens: int, now: float) -> int:
        """Blocks to compute a draft in behind its last token, of what nobody needs in the next step. How many tokens
        there is room for, at most so many."""
        num_free = len(sequence.block_ids) * self._block_size - len(sequence.token_ids)
        if num_tokens > num_free:
            num_spare = self._pool.num_available - len(self.running)
            num_more = min(-(-(num_tokens - num_free) // self._block_size), num_spare)
            if num_more > 0:
                sequence.held(now)
                sequence.block_ids += self._pool.allocate(num_more, sequence.block_ids[-1])
                num_free += num_more * self._block_size
        num_tokens = min(num_tokens, num_free)
        self._windows.hold(sequence, 1 + num_tokens)
        return num_tokens

    def end_draft(self, sequence: Sequence, num_accepted: int, now: float) -> None:
        """So many tokens of its draft have become its own; what the others were computed in is given back."""
        sequence.draft_token_ids = []
        if num_accepted:
            self.commit(sequence, num_accepted)
        self._windows.hold(sequence)
        num_needed = -(-len(sequence.token_ids) // self._block_size)
        if len(sequence.block_ids) > num_needed:
            sequence.held(now)
            self._pool.release(sequence.block_ids[num_needed:])
            del sequence.block_ids[num_needed:]
        self._let_go(sequence, now)

    def fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Those of its request that have waited for its prompt, now running beside it on the same blocks."""
        if leader.request.leader is not leader:
            return []
        forks = followers(leader)[: num_slots(leader, self.limits) - 1]
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
            self._windows.hold(sequence)
            insort(self.running, sequence, key=_place)
        leader.may_share_tail = bool(forks)
        return forks

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Back to its place among the waiting; what it computed is computed again, or found in the cache."""
        self._take_from(self.running, sequence)
        self._release(sequence, now)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.draft_token_ids = []
        sequence.may_share_tail = False
        sequence.preempted(now)
        self.num_preemptions += 1
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        insort(self.waiting, sequence, key=_place)

    def counts(self) -> dict[str, Any]:
        """What a worker's ``Stats`` say of it, by field."""
        names = ("num_cached_tokens", "num_preemptions", "num_paused", "num_tail_frees", "num_displacements")
        pool = self._pool
        return {
            "num_waiting": len(self.waiting),
            "num_running": len(self.running),
            "num_blocks": pool.num_blocks,
            "num_used_blocks": pool.num_used,
            "num_cached_blocks": pool.num_cached,
            "num_free_blocks": pool.num_free,
            **{name: getattr(self, name) for name in names},
        }

    def audit(self) -> None:
        """Every block and every queue entry accounted for. Raises AssertionError."""
        self._pool.audit(sequence.held_block_ids for sequence in self.running)
        self._windows.audit(self.running)
        assert not any(sequence.block_ids for sequence in self.waiting), "a waiting sequence holds blocks"
        queued = {sequence.arrival for sequence in self.waiting} | {sequence.arrival for sequence in self.running}
        assert queued == self._by_arrival.keys()
        assert len(queued) == len(self.waiting) + len(self.running)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_place), "a queue is out of order"

    # Carrying it out

    def _carry_out(self, plan: Plan, now: float) -> None:
        by_arrival = self._by_arrival
        for arrival in plan.preempted:
            self.preempt(by_arrival[arrival], now)
        for arrival, num_blocks in plan.cut:
            self._cut(by_arrival[arrival], num_blocks, now)
        grown = [by_arrival[arrival] for arrival in plan.grown]
        admitted = [by_arrival[arrival] for arrival in plan.admitted]
        for sequence in (*grown, *admitted):  # before anything is allocated, which may evict
            if sequence.hits:
                self._take_hits(sequence, now)
        for sequence in grown:
            self._grow(sequence, now)
        for sequence in admitted:
            self._admit(sequence, now)
        for arrival in plan.overtaken:
            by_arrival[arrival].num_overtaken += 1
        self.num_displacements += plan.num_displacing

    def _take_tails(self, grants: list[tuple[Sequence, int]], now: float) -> None:
        """Whoever writes in its last block has it for itself: those who still read there, since they pause and had no
        room for a copy, lose it."""
        for sequence, _ in grants:
            if sequence.may_share_tail:
                tail = sequence.block_ids[-1]
                for other in sequence.request.live:
                    if other is not sequence and other.block_ids and other.block_ids[-1] == tail:
                        self._shorten(other, len(other.block_ids) - 1, now)
                sequence.may_share_tail = False

    def _cut(self, sequence: Sequence, num_wanted: int, now: float) -> None:
        """Its last blocks go, until so many more are available; it computes them again when it has room."""
        num_kept = len(sequence.block_ids)
        num_found = 0
        while num_found < num_wanted:
            num_kept -= 1
            num_found += self._pool.num_users(sequence.block_ids[num_kept]) == 1
        self._shorten(sequence, num_kept, now)

    def _shorten(self, sequence: Sequence, num_kept: int, now: float) -> None:
        block_ids = sequence.block_ids
        if num_kept * self._block_size < sequence.num_computed:
            num_kept = self._windows.reach(block_ids[:num_kept])
        # Before the end that it lost, it has nothing to look back on; and what is pooled is pooled from its beginning.
        if num_kept == 0 or sequence.num_gone or sequence.pooling is not None:
            return self.preempt(sequence, now)
        if sequence.num_pending == 1 or len(block_ids) * self._block_size >= len(sequence.token_ids):  # else it is cut
            sequence.preempted(now)
            self.num_tail_frees += 1
        sequence.held(now)
        sequence.num_computed = min(sequence.num_computed, num_kept * self._block_size)
        sequence.num_sealed = min(sequence.num_sealed, num_kept)
        self._windows.hold(sequence)
        self._pool.release(block_ids[num_kept:])
        del block_ids[num_kept:]
        sequence.may_share_tail = False
        return None

    def _age(self, now: float) -> None:
        """Who has waited or stood still for long becomes more important."""
        self._ages_at = now + AGE_EVERY_S
        for queue in (self.waiting, self.running):
            places = [raised(each.place, each.priority, each.ttft_s, each.moved_at, now) for each in queue]
            if any(place != each.place for place, each in zip(places, queue, strict=True)):
                for place, each in zip(places, queue, strict=True):
                    each.place = place
                queue.sort(key=_place)

    def _take_hits(self, sequence: Sequence, now: float) -> None:
        """What the cache has of it becomes the end of its table."""
        sequence.held(now)
        self._pool.acquire(sequence.hits)
        sequence.block_ids += sequence.hits
        sequence.hits = []
        sequence.num_sealed = len(sequence.block_ids)
        sequence.num_computed = sequence.num_sealed * self._block_size
        self._windows.hold(sequence)

    def _admit(self, sequence: Sequence, now: float) -> None:
        self._take_from(self.waiting, sequence)
        block_ids = sequence.block_ids
        num_missing = -(-len(sequence.token_ids) // self._block_size) - len(block_ids)
        sequence.held(now)
        block_ids += self._pool.allocate(num_missing, block_ids[-1] if block_ids else NO_PARENT)
        if sequence.started_at is None:
            sequence.started_at = now
            self._credit(sequence, sequence.num_computed)
        if not sequence.has_output and followers(sequence):
            sequence.request.leader = sequence
        insort(self.running, sequence, key=_place)

    def _grow(self, sequence: Sequence, now: float) -> None:
        """A block to write the next token in, or all that it has lost; or a copy of a tail that others still read."""
        block_ids = sequence.block_ids
        num_missing = -(-len(sequence.token_ids) // self._block_size) - len(block_ids)
        if num_missing:
            self._let_go(sequence, now)
            sequence.held(now)
            block_ids += self._pool.allocate(num_missing, block_ids[-1])
        else:
            shared = block_ids[-1]
            (own,) = self._pool.allocate(1, block_ids[-2] if len(block_ids) > 1 else NO_PARENT)
            self._windows.use(own)
            self._copy_block(shared, own)
            self._windows.drop(shared)
            self._pool.release((shared,))
            block_ids[-1] = own
        sequence.may_share_tail = False

    def _let_go(self, sequence: Sequence, now: float) -> None:
        """Of the blocks that no token will look back on."""
        if not self._window or not sequence.has_output:
            return
        num_seen = min(sequence.num_computed, sequence.num_known) - 1  # a token may be computed once more
        num_gone = min(num_seen - self._window + 1, sequence.num_computed) // self._block_size
        if num_gone > sequence.num_gone and num_gone >= sequence.num_sealed:
            sequence.held(now)
            self._pool.release(sequence.block_ids[sequence.num_gone : num_gone])
            sequence.num_gone = num_gone
            # So that whoever reads the whole table reads nobody else's: the first of its own stands for what is gone.
            sequence.block_ids[:num_gone] = [sequence.block_ids[num_gone]] * num_gone

    def _catch_up(self, sequence: Sequence, found: list[int]) -> None:
        """Step over blocks that another sequence has filled with the same tokens since."""
        first, num_sealed = sequence.num_sealed, sequence.num_sealed + len(found)
        self._windows.release(sequence)
        self._pool.acquire(found)
        self._pool.release(sequence.block_ids[first:num_sealed])
        sequence.block_ids[first:num_sealed] = found
        num_tokens = num_sealed * self._block_size
        if sequence.num_preemptions == 0:
            self._credit(sequence, num_tokens - sequence.num_computed)
        sequence.num_sealed, sequence.num_computed = num_sealed, num_tokens
        self._windows.hold(sequence)

    # Small things

    def _credit(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt tokens found rather than computed."""
        sequence.num_cached_tokens += num_tokens
        self.num_cached_tokens += num_tokens

    def _release(self, sequence: Sequence, now: float) -> None:
        sequence.held(now)
        self._windows.release(sequence)
        self._pool.release(sequence.held_block_ids)
        sequence.block_ids = []
        sequence.num_gone = 0

    @staticmethod
    def _take_from(queue: list[Sequence], sequence: Sequence) -> None:
        position = bisect_left(queue, sequence.place, key=_place)
        assert queue[position] is sequence, "a sequence is not where its order puts it"
        del queue[position]
