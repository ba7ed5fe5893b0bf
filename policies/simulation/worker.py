"""A worker that computes nothing: the real plan of each step (policies/batching), and a formula for its time.

Blocks are counted and not shared: what a recorded request found in a prefix cache it finds again, and what loses blocks
computes again all that was in them. A stretch of steps in which every sequence writes one token and nothing else can
happen is taken at once; it is cut short when a request comes in between.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from policies import batching
from policies.batching import Claim, Limits, Place, Turns, party_of, raised, token_due_at
from policies.costs import StepCosts, Work, pairs, shares

MAX_STRETCH = 4096
"""Steps taken at once."""

_place = attrgetter("place")
AGE_EVERY_S = 1.0
"""As in a worker."""


class Promise(NamedTuple):
    """What a request was promised, and whose it is; as in ``wire.Submit``."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    tenant: bytes = b""
    weight: float = 1.0


NO_PROMISE = Promise()


class Simulated:
    """One sequence in the worker."""

    __slots__ = (
        "arrival",
        "engine_s",
        "first_token_at",
        "is_done",
        "item",
        "last_token_at",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_known",
        "num_left",
        "num_overtaken",
        "num_preemptions",
        "num_written",
        "place",
        "priority",
        "tenant",
        "tpot_s",
        "ttft_s",
        "weight",
    )

    def __init__(
        self,
        item: object,
        priority: int,
        num_prompt_tokens: int,
        num_cached: int,
        num_left: int,
        promise: Promise = NO_PROMISE,
    ) -> None:
        """``num_cached`` of the prompt are found; ``num_left`` >= 1 tokens are written, then it has finished."""
        self.item = item
        """Whoever it belongs to; nothing here looks at it."""
        self.priority = priority
        self.ttft_s, self.tpot_s, self.tenant, self.weight = promise
        self.arrival = 0
        self.place: Place = (priority, 0.0, 0)
        self.num_cached = min(num_cached, num_prompt_tokens - 1)
        self.num_known = num_prompt_tokens
        self.num_computed = 0
        self.num_blocks = 0
        self.num_left = num_left
        self.num_preemptions = 0
        """How often it lost blocks, all or the last ones."""
        self.num_overtaken = 0
        self.num_written = 0
        self.engine_s = 0.0
        """Its share of the steps that it was in."""
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        """When it came, until there is one."""
        self.is_done = False

    @property
    def num_pending(self) -> int:
        """Tokens known and not computed yet."""
        return self.num_known - self.num_computed


class Stretch:
    """``num_steps`` equal steps from ``start``, the first of them ``step_s`` long and each ``growth_s`` longer."""

    __slots__ = ("grants", "growth_s", "num_steps", "num_told", "start", "step_s", "work")

    def __init__(
        self,
        start: float,
        step_s: float,
        growth_s: float,
        num_steps: int,
        grants: list[tuple[Simulated, int]],
        work: Work,
    ) -> None:
        """``work`` of the first step."""
        self.start = start
        self.step_s = step_s
        self.growth_s = growth_s
        self.num_steps = num_steps
        self.num_told = 0
        """Steps whose tokens somebody has been told of while it lasts."""
        self.grants = grants
        self.work = work

    @property
    def end(self) -> float:
        return self.start + self._after(self.num_steps)

    def cut(self, now: float) -> None:
        """It ends with the step that runs at ``now``."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.start + self._after(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self.num_steps = low

    def tell(self, now: float) -> int:
        """Steps that have ended by now and were not told of; from now on they are."""
        low, high = self.num_told, self.num_steps - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.start + self._after(middle) <= now:
                low = middle
            else:
                high = middle - 1
        num_new, self.num_told = low - self.num_told, low
        return num_new

    def _after(self, num_steps: int) -> float:
        return num_steps * self.step_s + self.growth_s * num_steps * (num_steps - 1) / 2


class Worker:
    """Its batch, its blocks and the step it computes. ``begin`` a stretch, wait until it ends, ``finish`` it."""

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        costs: StepCosts,
        allowance: Callable[[Simulated], int],
    ) -> None:
        """``costs``: what a step takes, and what the plan believes it takes. ``allowance``: how many tokens a sequence
        may write before somebody has to be asked again; asked before each stretch."""
        self.running: list[Simulated] = []
        self.waiting: list[Simulated] = []
        self.num_sequences = 0
        """Open, running or not."""
        self.num_preemptions = 0
        """Of sequences that lost all their blocks."""
        self.num_tail_frees = 0
        """Of those that lost the last ones."""
        self.num_displacements = 0
        self.busy_s = 0.0
        self.stretch: Stretch | None = None
        self._limits = limits
        self._block_size = block_size
        self._num_blocks = self._num_free = num_blocks
        self._costs = costs
        self._allowance = allowance
        self._turns = Turns()
        self._ages_at = 0.0
        self._num_arrivals = 0

    def submit(self, sequence: Simulated, now: float) -> None:
        """It joins in the next step that begins; its prompt and all that it writes fit into the blocks."""
        assert -(-(sequence.num_known + sequence.num_left) // self._block_size) <= self._num_blocks
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        sequence.place = (sequence.priority, now + (sequence.ttft_s or 0.0), sequence.arrival)
        sequence.last_token_at = now
        insort(self.waiting, sequence, key=_place)
        self.num_sequences += 1
        if self.stretch is not None:
            self.stretch.cut(now)

    def begin(self, now: float) -> Stretch | None:
        """The next step or steps; None when there is nothing to do."""
        assert self.stretch is None
        if not self.running and not self.waiting:
            return None
        if now >= self._ages_at:
            self._age(now)
        running, waiting = self.running, self.waiting
        claims = [self._claim(sequence) for sequence in running]
        parties = {party_of(sequence) for sequence in waiting}
        parties.update([party_of(claim) for claim in claims if claim.num_pending > 1])
        self._turns.begin(parties)
        plan = batching.plan(
            claims,
            waiting,
            self._num_free,
            self._limits,
            claim=self._waiting_claim,
            freed=lambda order: [(running[index].num_blocks,) * 2 for index in order],
            due=lambda index: self._token_due_at(running[index]),
            costs=self._costs,
            turns=self._turns,
            now=now,
        )
        may_change = bool(waiting) and bool(running) and waiting[0].place < running[-1].place
        by_arrival = {sequence.arrival: sequence for sequence in (*running, *waiting)}
        for arrival in plan.preempted:
            self._preempt(by_arrival[arrival])
        for arrival, num_blocks in plan.cut:
            self._cut(by_arrival[arrival], num_blocks)
        for arrival in plan.grown:
            self._grow(by_arrival[arrival], by_arrival[arrival].num_known)
        for arrival in plan.admitted:
            self._admit(by_arrival[arrival])
        for arrival in plan.overtaken:
            by_arrival[arrival].num_overtaken += 1
        self.num_displacements += plan.num_displacing
        grants = [(by_arrival[arrival], num_tokens) for arrival, num_tokens in plan.grants]
        for sequence, num_tokens in grants:
            if num_tokens > 1:
                self._turns.charge(party_of(sequence), num_tokens, sequence.num_computed, self._costs, sequence.weight)
        work = self._work(grants)
        step_s = self._costs.predict(work)
        num_steps, growth_s = 1, 0.0
        if not plan.preempted and not may_change and not work.num_chunks and len(grants) == len(self.running):
            longer = work._replace(num_decode_context_tokens=work.num_decode_context_tokens + work.num_decodes)
            growth_s = self._costs.predict(longer) - step_s
            num_steps = self._num_alike(now, step_s, growth_s)
        self.stretch = Stretch(now, step_s, growth_s, num_steps, grants, work)
        return self.stretch

    def progress(self, now: float) -> list[tuple[Simulated, int]]:
        """The tokens that each sequence has written so far in the stretch, since the last call."""
        stretch = self.stretch
        num_new = 0 if stretch is None or stretch.num_steps == 1 else stretch.tell(now)
        return [] if stretch is None or not num_new else [(sequence, num_new) for sequence, _ in stretch.grants]

    def finish(self) -> list[tuple[Simulated, int]]:
        """The stretch is over: the tokens that each sequence wrote and nobody was told of. Those that are done have
        left."""
        stretch = self.stretch
        assert stretch is not None
        self.stretch = None
        self.busy_s += stretch.end - stretch.start
        decode_s, context_s, chunk, _ = shares(self._costs.weights, stretch.work, stretch.step_s)
        growth_s = context_s * (stretch.num_steps - 1) / 2
        wrote: list[tuple[Simulated, int]] = []
        for sequence, num_tokens in stretch.grants:
            if num_tokens == 1:
                sequence.engine_s += stretch.num_steps * (decode_s + context_s * (sequence.num_computed + 1) + growth_s)
            else:
                sequence.engine_s += chunk.seconds(num_tokens, sequence.num_computed)
            sequence.num_computed += num_tokens
            if sequence.num_computed < sequence.num_known:
                continue  # more of its prompt is to come
            sequence.num_computed += stretch.num_steps - 1
            sequence.num_known += stretch.num_steps
            sequence.num_left -= stretch.num_steps
            sequence.num_written += stretch.num_steps
            sequence.last_token_at = stretch.end
            self._grow(sequence, sequence.num_computed)
            if sequence.first_token_at is None:
                sequence.first_token_at = stretch.start + stretch.step_s
            wrote.append((sequence, stretch.num_steps - stretch.num_told))
            if not sequence.num_left:
                self.leave(sequence)
        return wrote

    def leave(self, sequence: Simulated) -> None:
        """It has ended, however."""
        sequence.is_done = True
        self.running.remove(sequence)
        self._num_free += sequence.num_blocks
        self.num_sequences -= 1

    # One step

    def _claim(self, sequence: Simulated) -> Claim:
        num_missing = max(0, -(-sequence.num_known // self._block_size) - sequence.num_blocks)
        return self._claimed(sequence, num_missing, sequence.num_computed)

    def _waiting_claim(self, sequence: Simulated) -> Claim:
        return self._claimed(sequence, -(-sequence.num_known // self._block_size), sequence.num_cached)

    def _claimed(self, sequence: Simulated, num_new_blocks: int, start: int) -> Claim:
        return Claim(
            place=sequence.place,
            num_pending=sequence.num_known - start,
            num_new_blocks=num_new_blocks,
            start=start,
            tenant=sequence.tenant,
            ttft_s=sequence.ttft_s,
            tpot_s=sequence.tpot_s,
            has_output=sequence.num_written > 0,
            is_immune=sequence.num_preemptions >= self._limits.max_preemptions,
            num_overtaken=sequence.num_overtaken,
            weight=sequence.weight,
        )

    @staticmethod
    def _token_due_at(sequence: Simulated) -> float:
        return token_due_at(sequence.tpot_s, sequence.first_token_at, sequence.last_token_at, sequence.num_written)

    def _age(self, now: float) -> None:
        self._ages_at = now + AGE_EVERY_S
        for queue in (self.waiting, self.running):
            for each in queue:
                each.place = raised(each.place, each.priority, each.ttft_s, each.last_token_at, now)
            queue.sort(key=_place)

    def _work(self, grants: Sequence[tuple[Simulated, int]]) -> Work:
        num_prefill = num_decodes = num_context = num_pairs = num_chunks = num_before = 0
        for sequence, num_tokens in grants:
            if num_tokens == 1:
                num_decodes += 1
                num_context += sequence.num_computed + 1
            else:
                num_prefill += num_tokens
                num_pairs += pairs(num_tokens, sequence.num_computed)
                num_chunks += 1
                num_before += sequence.num_computed
        return Work(num_prefill, num_decodes, num_context, num_pairs, num_chunks, num_before)

    def _num_alike(self, now: float, step_s: float, growth_s: float) -> int:
        """How many steps like this one follow each other before somebody ends, asks, lacks a block, pauses for the sake
        of others or has waited so long that it becomes more important."""
        limit_s = batching.pausing_above(self.running)
        if step_s > limit_s:
            return 1
        num_steps = MAX_STRETCH
        if growth_s > 0.0 and limit_s < math.inf:
            num_steps = min(num_steps, 1 + int((limit_s - step_s) / growth_s))
        if self.waiting:
            num_steps = min(num_steps, 1 + int(max(0.0, self._ages_at - now) / (step_s + num_steps * growth_s)))
        num_spare = self._num_free // len(self.running)
        for sequence in self.running:
            num_fitting = (sequence.num_blocks + num_spare) * self._block_size - sequence.num_known + 1
            num_steps = min(num_steps, sequence.num_left, self._allowance(sequence), num_fitting)
        return max(1, num_steps)

    # Blocks

    def _admit(self, sequence: Simulated) -> None:
        self.waiting.remove(sequence)
        sequence.num_computed = sequence.num_cached
        insort(self.running, sequence, key=_place)
        self._grow(sequence, sequence.num_known)

    def _grow(self, sequence: Simulated, num_tokens: int) -> None:
        num_more = max(0, -(-num_tokens // self._block_size) - sequence.num_blocks)
        assert num_more <= self._num_free, "more blocks are given than there are"
        self._num_free -= num_more
        sequence.num_blocks += num_more

    def _cut(self, sequence: Simulated, num_blocks: int) -> None:
        is_whole = -(-sequence.num_known // self._block_size) <= sequence.num_blocks
        if is_whole or sequence.num_pending == 1:  # else it was cut before
            sequence.num_preemptions += 1
            self.num_tail_frees += 1
        sequence.num_blocks -= num_blocks
        self._num_free += num_blocks
        sequence.num_computed = min(sequence.num_computed, sequence.num_blocks * self._block_size)

    def _preempt(self, sequence: Simulated) -> None:
        self.running.remove(sequence)
        self._num_free += sequence.num_blocks
        sequence.num_blocks = 0
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_place)
