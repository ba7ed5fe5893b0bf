"""What a step may take: how long, by what was promised to those who write, and what of it prompts may have.

The fitted costs (policies/costs.py) say what a step of the answers alone takes. Beside them prompts get as much as
``max_slowdown`` leaves, so that streams are smooth where nothing was promised and where promises are loose; less, where
the tightest promise among the answers would be broken; and more, when a first token would otherwise come too late: then
an answer that is ahead of what it was promised, a mean over its tokens, waits for it. Where even the answers alone
would take longer than the more important of them were promised, the less important pause for as long as their own
promise allows: each still writes its tokens in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from policies.batching.claims import Claim, Limits, Place
from policies.costs import StepCosts

MIN_CHUNK = 16
"""Tokens that the first prompt in its turn gets in any step, however dear: it must arrive one day."""
BURST_WEIGHT = 32
"""Of several who wait for a first token, each but the first counts as much as so many who wait for their next one."""
BURST_S, BURST_SLOWDOWN = 0.3, 4.0
"""That is what prompts get for it at most, or so many times what the answers alone take: longer steps make nothing
sooner, and streams uneven."""
MARGIN = 0.9
"""Of a promised gap: who may pause does where a step would take longer, since some take longer than predicted."""
RESERVE = 0.25
"""Of a promised gap, what an answer is to stay ahead of the latest instants at which its tokens may come."""
MAX_STRETCH = 3
"""So many promised gaps one may take in which a first token is in danger, if the answer was that far ahead."""
LEAST = 0.25
"""Of the time that the answers take, what prompts may have in any case: where a promise leaves less, keeping it to the
letter would keep everybody else from ever beginning."""
URGENT = 0.25
"""A first token is in danger when less than this part of its promise would be left."""
MIN_PROMISE_S = 1.0
"""A promise that is broken already is renewed after as long as it was, and at least this."""


class Promised(Protocol):
    """A sequence, as far as it may have to pause."""

    @property
    def place(self) -> Place: ...
    @property
    def tpot_s(self) -> float | None: ...


def pausing_above(decodes: Sequence[Promised]) -> float:
    """The longest step of these, in order, in which none of them pauses for the more important."""
    last = decodes[-1].place[0]
    promises = [each.tpot_s for each in decodes if each.tpot_s is not None and each.place[0] < last]
    return MARGIN * min(promises, default=math.inf)


class Pace:
    """The time of one step. Without costs, or before they are known, only the limits in tokens hold."""

    def __init__(self, limits: Limits, costs: StepCosts | None, now: float) -> None:
        self.now = now
        self.token_s = 0.0
        """About what a prompt token takes; 0: not known."""
        self._limits = limits
        self._costs = costs if costs is not None and costs.known else None
        if self._costs is not None:
            self._weights = self._costs.weights
            self._price = self._costs.chunk_price
            self.token_s = self._price.token_s
        self._alone_s = 0.0
        self._num_tokens = 0
        self._usual_s = self._most_s = math.inf
        self._spent_s = 0.0
        self._is_first = True

    def pausing(
        self, running: Sequence[Claim], decodes: Sequence[int], token_due_at: Callable[[int], float]
    ) -> set[int]:
        """Of ``decodes``, indices in order, those who pause so that the more important ones have their tokens in
        time."""
        if self._costs is None or running[decodes[0]].place[0] == running[decodes[-1]].place[0]:
            return set()
        limits_s = self._limits_s(running, decodes)
        if limits_s[-1] == math.inf:
            return set()
        step, _, decode, context, *_ = self._weights
        taken_s = step + sum([decode + context * (running[index].start + 1) for index in decodes])
        paused = set()
        for index, limit_s in zip(reversed(decodes), reversed(limits_s), strict=True):
            if taken_s <= limit_s:
                break
            if token_due_at(index) > self.now + taken_s:
                paused.add(index)
                taken_s -= decode + context * (running[index].start + 1)
        return paused

    def _limits_s(self, running: Sequence[Claim], decodes: Sequence[int]) -> list[float]:
        """For each, what a step with it may take for those who are more important."""
        limits_s = []
        above_s = own_s = math.inf
        priority = running[decodes[0]].place[0]
        for index in decodes:
            claim = running[index]
            if claim.place[0] != priority:
                priority, above_s = claim.place[0], min(above_s, own_s)
            limits_s.append(MARGIN * above_s)
            if claim.tpot_s is not None and claim.tpot_s < own_s:
                own_s = claim.tpot_s
        return limits_s

    def begin(
        self, running: Sequence[Claim], decodes: Sequence[int], token_due_at: Callable[[int], float], num_prompts: int
    ) -> None:
        """``decodes`` have their tokens in this step, and so many prompts wait for some."""
        limits, num_decodes = self._limits, len(decodes)
        self._num_tokens = max(0, limits.max_step_tokens - num_decodes)
        if num_decodes:
            self._num_tokens = min(self._num_tokens, limits.max_prefill_tokens_beside_decodes)
        if self._costs is None:
            return
        self._usual_s = self._most_s = limits.max_prefill_s
        if not num_decodes:
            return
        step, _, decode, context, *_ = self._weights
        num_context_tokens = num_decodes + sum([running[index].start for index in decodes])
        alone_s = self._alone_s = step + decode * num_decodes + context * num_context_tokens
        smooth_s = latest_s = math.inf
        is_promised = True
        for index in decodes:
            tpot_s = running[index].tpot_s
            if tpot_s is None or not running[index].has_output:
                is_promised = is_promised and tpot_s is not None
                continue
            left_s = token_due_at(index) - self.now - RESERVE * tpot_s
            smooth_s = min(smooth_s, tpot_s, left_s)
            latest_s = min(latest_s, MAX_STRETCH * tpot_s, left_s)
        least_s = LEAST * alone_s
        self._most_s = min(self._most_s, max(least_s, latest_s - alone_s))
        self._usual_s = min(self._most_s, max(least_s, smooth_s - alone_s))
        if limits.max_slowdown:
            # One prompt keeps to its share. Were several spread over many steps, the first would have ended before the
            # last begin; and a step of few answers takes hardly less than one of many.
            share_s = alone_s * (limits.max_slowdown - 1.0)
            burst_s = share_s * BURST_WEIGHT * (num_prompts - 1) / num_decodes
            most_s = max(BURST_S, BURST_SLOWDOWN * alone_s)
            self._usual_s = min(self._usual_s, max(share_s, min(burst_s, most_s)))
            if not is_promised:
                self._most_s = self._usual_s

    def chunk(self, claim: Claim) -> int:
        """The tokens that this prompt may compute now."""
        num_tokens = self._chunk(claim)
        if self._limits.whole_prompts and num_tokens < claim.num_pending:
            return claim.num_pending if self._is_first else 0
        return num_tokens

    def _chunk(self, claim: Claim) -> int:
        num_tokens = min(claim.num_pending, self._num_tokens)
        if self._costs is None or not num_tokens:
            return num_tokens
        budget_s = self._most_s if self._is_urgent(claim) else self._usual_s
        least = MIN_CHUNK if self._is_first else 0
        return min(num_tokens, max(least, self._price.tokens_within(budget_s - self._spent_s, claim.start)))

    def spend(self, claim: Claim, num_tokens: int) -> None:
        self._is_first = False
        self._num_tokens -= num_tokens
        if self._costs is not None:
            self._spent_s += self._price.seconds(num_tokens, claim.start)

    def work_s(self, claim: Claim) -> float:
        """Of a whole prompt, alone; 0 while nothing is known."""
        return 0.0 if self._costs is None else self._price.seconds(claim.num_pending, claim.start)

    def again_s(self, claim: Claim) -> float:
        """For each token that it holds blocks for, what it takes to compute those again that are computed; 0 while
        nothing is known."""
        if self._costs is None or not claim.start:
            return 0.0
        return self._price.seconds(claim.start, 0) / (claim.start + claim.num_pending)

    def would_save(self, claim: Claim, ahead_s: float) -> bool:
        """Whether putting others aside for a prompt keeps its promise, which would be broken without: it comes in time
        if it begins now, and hardly if it waits. A promise that cannot be kept any more is renewed. ``ahead_s``: the
        work of the prompts that go before it."""
        if self._costs is None or claim.ttft_s is None:
            return True
        period_s = max(MIN_PROMISE_S, claim.ttft_s)
        comes_at = self.now + self._takes_s(ahead_s + self.work_s(claim), self._most_s)
        due_at = claim.due_at + period_s * max(0, math.ceil((comes_at - claim.due_at) / period_s))
        return due_at - comes_at <= URGENT * period_s

    def _is_urgent(self, claim: Claim) -> bool:
        if self._most_s <= self._usual_s or claim.ttft_s is None or claim.has_output:
            return False
        return self.now + self._takes_s(self.work_s(claim), self._usual_s) > claim.due_at

    def _takes_s(self, work_s: float, share_s: float) -> float:
        """With so many seconds for prompts in each step."""
        if not self._alone_s:
            return work_s
        return work_s + self._alone_s * max(1.0, work_s / max(share_s, 1e-6))
