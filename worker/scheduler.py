"""Who computes what in this step: the queues, and the plan of policies/batching carried out on block tables.

A sequence holds the blocks of all its known tokens from the moment it is admitted, so a prompt lies in one run and
never finds the pool empty half-way; only one that had to give up its end has fewer, and stands still meanwhile. Prompts
that begin alike and come together are computed once: the later one waits a step, and takes over the blocks that the
earlier one has filled.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Set
from operator import attrgetter
from typing import Any

from policies import batching
from policies.batching import Claim, Limits, Plan, Turns, party_of, raised
from policies.costs import StepCosts
from policies.terms import FinishReason
from worker.blocks import Pool
from worker.claims import Claims, followers, held_back, num_slots
from worker.sequence import Sequence
from worker.tables import Tables
from worker.windows import Apart, Windows

AGE_EVERY_S = 1.0
"""How often it is looked whether somebody has waited too long."""

NOBODY: Set[Sequence] = frozenset()

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
        self.num_prompt_tokens = 0
        """See ``wire.Stats``."""
        self._pool, self._block_size = pool, block_size
        self.limits = limits
        self._by_arrival: dict[int, Sequence] = {}
        self._aside: set[Sequence] = set()
        """Those that may be held up by their guides, and lie still meanwhile where they are."""
        self.num_held_up = self.num_idle = 0
        """Of the last step; ``num_idle``: of those running, and with nothing else to compute."""
        self._windows = Windows(apart, pool, block_size)
        self._tables = Tables(pool, self._windows, block_size, window, copy_block)
        self._claims = Claims(pool, self._windows, block_size, self._catch_up)
        self._turns = Turns()
        self._ages_at = 0.0

    def add(self, sequence: Sequence) -> None:
        """To the waiting ones."""
        self._by_arrival[sequence.arrival] = sequence
        if sequence.guide is not None and sequence.guide.is_aside:
            self._aside.add(sequence)
        insort(self.waiting, sequence, key=_place)

    def remove(self, sequence: Sequence, now: float) -> None:
        """It has ended, however: its blocks are available at once."""
        sequence.has_ended = True
        del self._by_arrival[sequence.arrival]
        self._aside.discard(sequence)
        if sequence.block_ids:
            self._take_from(self.running, sequence)
            self._tables.release(sequence, now)
        else:
            self._take_from(self.waiting, sequence)
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        sequence.request.live.remove(sequence)

    def doubt(self, sequence: Sequence) -> None:
        """Its numbers are no good, and it is about to be removed: nobody is to begin with what it leaves."""
        self._pool.doubt(sequence.held_block_ids)

    def schedule(self, now: float, costs: StepCosts | None = None) -> list[tuple[Sequence, int]]:
        """The sequences of this step, each with a number of pending tokens; all blocks that they will write are theirs
        alone. ``costs`` as for batching.plan."""
        # Of some it may be known since a moment ago that they have ended.
        held_up = self._held_up() if self._aside else NOBODY
        self.num_held_up = len(held_up)
        for sequence in held_up:
            sequence.held_up_at = now
        if now >= self._ages_at:
            self._age(now)
        if self.waiting or not self._claims.are_plain(self.running, self.limits):
            return self._planned(now, costs, held_up)
        self.num_paused = 0
        running = [each for each in self.running if each not in held_up] if held_up else self.running
        self.num_idle = len(self.running) - len(running)
        for sequence in running:
            self._windows.hold(sequence, 1)
        return [(sequence, 1) for sequence in running]

    def _planned(self, now: float, costs: StepCosts | None, held_up: Set[Sequence]) -> list[tuple[Sequence, int]]:
        of_running, running, waiting = self._claims.of_running, self.running, self.waiting
        of_waiting = self._claims.of_waiting
        self._claims.begin(self.limits)
        claims = [of_running(sequence) for sequence in running]
        if held_up:
            claims = [
                held_back(claim, each) if each in held_up else claim
                for each, claim in zip(running, claims, strict=True)
            ]
        self.num_idle = sum([claim.is_idle for claim in claims]) if held_up else 0
        prompts = [claim for claim in claims if claim.num_pending > 1]
        if waiting or prompts:
            self._turns.begin({party_of(claim) for claim in prompts} | {party_of(each) for each in waiting})
        plan = batching.plan(
            claims,
            waiting,
            self._pool.num_available,
            self.limits,
            claim=of_waiting if not held_up else lambda each: self._of_waiting(each, held_up),
            freed=lambda order: self._claims.freed(running, order),
            # Nobody hurries for one that could not go on.
            due=lambda index: math.inf if running[index] in held_up else running[index].token_due_at,
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
                self._turns.charge(party_of(sequence), num_tokens, sequence.num_computed, costs, sequence.weight)
        return grants

    def _of_waiting(self, sequence: Sequence, held_up: Set[Sequence]) -> Claim | None:
        claim = self._claims.of_waiting(sequence)
        return claim if claim is None or sequence not in held_up else held_back(claim, sequence)

    def take_back(self, grants: list[tuple[Sequence, int]], costs: StepCosts | None = None) -> None:
        """Nothing of them was computed, and it is planned again: it has been nobody's turn."""
        for sequence, num_tokens in grants:
            if num_tokens > 1:
                self._turns.charge(party_of(sequence), num_tokens, sequence.num_computed, costs, -sequence.weight)

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more are computed; blocks filled by known ones get their names."""
        sequence.num_computed += num_tokens
        if sequence.num_unread:
            self._read(sequence)
        self._tables.seal(sequence)
        self._windows.hold(sequence, len(sequence.draft_token_ids))

    def make_room(self, sequence: Sequence, num_tokens: int, now: float) -> int:
        """Blocks to compute a draft in behind its last token, of what nobody needs in the next step. How many tokens
        there is room for, at most so many."""
        return self._tables.make_room(sequence, num_tokens, len(self.running), now)

    def end_draft(self, sequence: Sequence, num_accepted: int, now: float) -> None:
        """So many tokens of its draft have become its own; what the others were computed in is given back."""
        sequence.draft_token_ids = []
        if num_accepted:
            self.commit(sequence, num_accepted)
        self._tables.trim(sequence, now)

    def fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Those of its request that have waited for its prompt, now running beside it on the same blocks."""
        if leader.request.leader is not leader:
            return []
        forks = followers(leader)[: num_slots(leader, self.limits) - 1]
        leader.request.leader = None
        for sequence in forks:
            self._take_from(self.waiting, sequence)
            self._tables.share(leader, sequence, now)
            sequence.num_cached_tokens, sequence.num_unread = leader.num_cached_tokens, 0
            sequence.started_at = leader.started_at
            sequence.may_share_tail = True
            insort(self.running, sequence, key=_place)
        leader.may_share_tail = bool(forks)
        return forks

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Back to its place among the waiting; what it computed is computed again, or found in the cache."""
        self._take_from(self.running, sequence)
        sequence.preempted(now)
        self._tables.release(sequence, now)
        sequence.num_computed = sequence.num_sealed = 0
        sequence.draft_token_ids = []
        sequence.may_share_tail = False
        self.num_preemptions += 1
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        insort(self.waiting, sequence, key=_place)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Nothing was drawn behind its last token: that is computed again, with what else is in its block."""
        if sequence.guide is not None and sequence.guide.is_aside:
            self._aside.add(sequence)
        sequence.draft_token_ids = []
        num_kept = self._tables.num_usable(sequence, (len(sequence.token_ids) - 1) // self._block_size)
        if num_kept:
            self._tables.cut(sequence, num_kept, now)
        else:
            self.preempt(sequence, now)

    def ended_aside(self) -> list[tuple[Sequence, FinishReason]]:
        """Of those that their guides held up, those of which it is known now that nothing can be added, and how they
        ended."""
        return [(each, reason) for each in self._aside if (reason := each.ended_aside) is not None]

    def counts(self) -> dict[str, Any]:
        """What a worker's ``Stats`` say of it, by field."""
        totals = "num_prompt_tokens", "num_cached_tokens", "num_preemptions", "num_tail_frees", "num_displacements"
        pool, num_running = self._pool, len(self.running)
        return {
            "num_waiting": len(self.waiting),
            "num_running": num_running,
            # Of the last step, since when some may have ended.
            "num_paused": min(self.num_paused, num_running),
            "num_idle": min(self.num_idle, num_running),
            "num_blocks": pool.num_blocks,
            "num_used_blocks": pool.num_used,
            "num_cached_blocks": pool.num_cached,
            "num_free_blocks": pool.num_free,
            **{name: getattr(self, name) for name in totals},
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

    def _held_up(self) -> Set[Sequence]:
        """Those of which nothing more can be drawn yet. Whoever begins with the same row of logits waits for all."""
        held_up = {each for each in self._aside if each.is_held_up or each.ended_aside}
        for request in {each.request for each in held_up if not each.has_output}:
            held_up.update(each for each in request.live if not each.has_output)
        return held_up

    # Carrying it out

    def _carry_out(self, plan: Plan, now: float) -> None:
        by_arrival = self._by_arrival
        for arrival in plan.preempted:
            self.preempt(by_arrival[arrival], now)
        for arrival, num_blocks in plan.cut:
            sequence = by_arrival[arrival]
            self._shorten(sequence, self._tables.num_left(sequence, num_blocks), now)
        grown = [by_arrival[arrival] for arrival in plan.grown]
        admitted = [by_arrival[arrival] for arrival in plan.admitted]
        for sequence in (*grown, *admitted):  # before anything is allocated, which may evict
            if sequence.hits:
                self._tables.take_hits(sequence, now)
        for sequence in grown:
            self._tables.grow(sequence, now)
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

    def _shorten(self, sequence: Sequence, num_kept: int, now: float) -> None:
        """Its last blocks go; it computes them again when it has room."""
        num_kept = self._tables.num_usable(sequence, num_kept)
        if num_kept == 0:
            return self.preempt(sequence, now)
        if sequence.num_pending == 1 or self._tables.num_missing(sequence) <= 0:  # else it is cut
            sequence.preempted(now)
            self.num_tail_frees += 1
        self._tables.cut(sequence, num_kept, now)
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

    def _admit(self, sequence: Sequence, now: float) -> None:
        self._take_from(self.waiting, sequence)
        self._tables.fill(sequence, now)
        if sequence.started_at is None:
            sequence.started_at = now
            self._credit(sequence, sequence.num_computed)
        self._read(sequence)
        if not sequence.has_output and followers(sequence):
            sequence.request.leader = sequence
        insort(self.running, sequence, key=_place)

    def _catch_up(self, sequence: Sequence, found: list[int]) -> None:
        """Another sequence has filled blocks with the same tokens since."""
        num_before = sequence.num_computed
        self._tables.catch_up(sequence, found)
        if sequence.num_preemptions == 0:
            self._credit(sequence, sequence.num_computed - num_before)
        self._read(sequence)

    # Small things

    def _credit(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt tokens found rather than computed."""
        sequence.num_cached_tokens += num_tokens
        self.num_cached_tokens += num_tokens

    def _read(self, sequence: Sequence) -> None:
        """So much of what it came with is computed or found; what was so before counts no more."""
        num_unread = max(0, sequence.num_prompt_tokens + sequence.num_emitted - sequence.num_computed)
        if num_unread < sequence.num_unread:
            self.num_prompt_tokens += sequence.num_unread - num_unread
            sequence.num_unread = num_unread

    @staticmethod
    def _take_from(queue: list[Sequence], sequence: Sequence) -> None:
        position = bisect_left(queue, sequence.place, key=_place)
        assert queue[position] is sequence, "a sequence is not where its order puts it"
        del queue[position]
