"""A worker that computes nothing: the real plan of each step (policies/batching.py), and a formula for its time.

Blocks are counted and not shared: what a recorded request found in a prefix cache it finds again, and what is
preempted computes all of it once more. A stretch of steps in which every sequence writes one token and nothing else can
happen is taken at once; it is cut short when a request comes in between.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter

from policies import batching
from policies.batching import Claim, Limits
from policies.costs import StepCosts, Work, pairs, shares

MAX_STRETCH = 4096
"""Steps taken at once."""

_order = attrgetter("priority", "arrival")


class Simulated:
    """One sequence in the worker."""

    __slots__ = (
        "arrival",
        "engine_s",
        "first_token_at",
        "is_done",
        "item",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_known",
        "num_left",
        "num_preemptions",
        "priority",
    )

    def __init__(self, item: object, priority: int, num_prompt_tokens: int, num_cached: int, num_left: int) -> None:
        """``num_cached`` of the prompt are found; ``num_left`` >= 1 tokens are written, then it has finished."""
        self.item = item
        """Whoever it belongs to; nothing here looks at it."""
        self.priority = priority
        self.arrival = 0
        self.num_cached = min(num_cached, num_prompt_tokens - 1)
        self.num_known = num_prompt_tokens
        self.num_computed = 0
        self.num_blocks = 0
        self.num_left = num_left
        self.num_preemptions = 0
        self.engine_s = 0.0
        """Its share of the steps that it was in."""
        self.first_token_at: float | None = None
        self.is_done = False


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
        self.busy_s = 0.0
        self.stretch: Stretch | None = None
        self._limits = limits
        self._block_size = block_size
        self._num_blocks = self._num_free = num_blocks
        self._costs = costs
        self._allowance = allowance
        self._num_arrivals = 0

    def submit(self, sequence: Simulated, now: float) -> None:
        """It joins in the next step that begins; its prompt and all that it writes fit into the blocks."""
        assert -(-(sequence.num_known + sequence.num_left) // self._block_size) <= self._num_blocks
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        insort(self.waiting, sequence, key=_order)
        self.num_sequences += 1
        if self.stretch is not None:
            self.stretch.cut(now)

    def begin(self, now: float) -> Stretch | None:
        """The next step or steps; None when there is nothing to do."""
        assert self.stretch is None
        if not self.running and not self.waiting:
            return None
        plan = batching.plan(
            [self._claim(sequence) for sequence in self.running],
            (self._waiting_claim(sequence) for sequence in self.waiting),
            self._num_free,
            self._limits,
            self._costs,
            num_waiting=len(self.waiting),
        )
        by_arrival = {sequence.arrival: sequence for sequence in self.running}
        by_arrival.update((sequence.arrival, sequence) for sequence in self.waiting)
        for arrival in plan.preempted:
            self._preempt(by_arrival[arrival])
        for sequence in self.running:
            if sequence.num_known - sequence.num_computed == 1:  # the plan has counted on it
                self._grow(sequence, sequence.num_known)
        for arrival in plan.admitted:
            self._admit(by_arrival[arrival])
        grants = [(by_arrival[arrival], num_tokens) for arrival, num_tokens in plan.grants]
        work = self._work(grants)
        num_steps = 1
        if not plan.preempted and not work.num_chunks and len(grants) == len(self.running):
            num_steps = self._num_alike()
        step_s = self._costs.predict(work)
        longer = work._replace(num_decode_context_tokens=work.num_decode_context_tokens + work.num_decodes)
        growth_s = self._costs.predict(longer) - step_s if num_steps > 1 else 0.0
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
        decode_s, context_s, chunk = shares(self._costs.weights, stretch.work, stretch.step_s)
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
        num_pending = sequence.num_known - sequence.num_computed
        num_new = 0
        if num_pending == 1 and sequence.num_known > sequence.num_blocks * self._block_size:
            num_new = 1
        return Claim(
            sequence.priority,
            sequence.arrival,
            num_pending,
            num_new,
            sequence.num_blocks,
            start=sequence.num_computed,
        )

    def _waiting_claim(self, sequence: Simulated) -> Claim:
        return Claim(
            sequence.priority,
            sequence.arrival,
            sequence.num_known - sequence.num_cached,
            -(-sequence.num_known // self._block_size),
            start=sequence.num_cached,
        )

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

    def _num_alike(self) -> int:
        """How many steps like this one follow each other before somebody ends, asks, or lacks a block."""
        num_steps = MAX_STRETCH
        num_spare = self._num_free // len(self.running)
        for sequence in self.running:
            num_fitting = (sequence.num_blocks + num_spare) * self._block_size - sequence.num_known + 1
            num_steps = min(num_steps, sequence.num_left, self._allowance(sequence), num_fitting)
        return max(1, num_steps)

    # Blocks

    def _admit(self, sequence: Simulated) -> None:
        self.waiting.remove(sequence)
        sequence.num_computed = sequence.num_cached
        insort(self.running, sequence, key=_order)
        self._grow(sequence, sequence.num_known)

    def _grow(self, sequence: Simulated, num_tokens: int) -> None:
        num_more = max(0, -(-num_tokens // self._block_size) - sequence.num_blocks)
        assert num_more <= self._num_free, "more blocks are given than there are"
        self._num_free -= num_more
        sequence.num_blocks += num_more

    def _preempt(self, sequence: Simulated) -> None:
        self.running.remove(sequence)
        self._num_free += sequence.num_blocks
        sequence.num_blocks = 0
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)
