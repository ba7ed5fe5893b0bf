"""When a request's first token will come, if it is let in now: the worker's fitted costs, and who goes before it.

A worker in balance starts as much work as it finishes. So a request that waits for a place gets it when the work of all
who go before it, and the end of one of those being computed, have been paid for at the pace of the workers; then its
prompt is computed after the prompts that were sent before it. Whoever comes later and goes first is in it as a stream:
more important classes are taken to ask for as much as they did lately, which leaves so much less of the workers (the
wait behind priorities, Cobham 1954). This is a fluid view: it knows how much, not which answer ends when. How far off
it was is measured where answers arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policies.costs import Weights, Work, pairs, predicted
from policies.priority import Lanes, Order

LATELY_S = 30.0
"""How long what a class asked for says something about what it will ask for: after that, a third as much."""
MOMENT_S = 0.2
"""What came within it is taken to have come at once."""
MIN_SEEN_S = 5.0
"""What came in less time than this is taken to have come in this."""


class Demand(NamedTuple):
    """What requests ask of a worker, taken together."""

    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_prompt_pairs: float = 0.0
    num_completion_tokens: float = 0.0

    def times(self, factor: float) -> Demand:
        """The same mixture, so many times as much."""
        return Demand(*[amount * factor for amount in self])

    def plus(self, other: Demand) -> Demand:
        """Both."""
        return Demand(*map(sum, zip(self, other, strict=True)))


NOTHING = Demand()


class Stream:
    """What one class asks for lately: what came, the older the less of it."""

    __slots__ = ("_amounts", "_at", "_began_at", "_num_expected", "_num_pairs", "_num_prompt", "_num_requests")

    def __init__(self) -> None:
        self._amounts = NOTHING
        """As of ``_at``."""
        self._at = self._began_at = -math.inf
        # What came since then, a moment at most; this is on the way of each request.
        self._num_requests = self._num_prompt = self._num_pairs = self._num_expected = 0

    def came(self, order: Order, now: float) -> None:
        """One more, that was let in."""
        if now - self._at > MOMENT_S:
            self._look(now)
        num_tokens = order.num_prompt_tokens
        self._num_requests += 1
        self._num_prompt += num_tokens
        self._num_pairs += pairs(num_tokens, 0)
        self._num_expected += order.num_expected_tokens

    def per_second(self, now: float) -> Demand:
        if self._at == -math.inf:
            return NOTHING
        self._look(now)
        seen_s = max(MIN_SEEN_S, now - self._began_at)
        return self._amounts.times(1.0 / (LATELY_S * (1.0 - math.exp(-seen_s / LATELY_S))))

    def _look(self, now: float) -> None:
        if self._at == -math.inf:
            self._at = self._began_at = now
        fresh = Demand(self._num_requests, self._num_prompt, self._num_pairs, self._num_expected)
        self._num_requests = self._num_prompt = self._num_pairs = self._num_expected = 0
        self._amounts = self._amounts.plus(fresh).times(math.exp((self._at - now) / LATELY_S))
        self._at = now


class Pace(NamedTuple):
    """What a worker's time buys while its batch is as it is now; seconds for one of each."""

    request_s: float
    prompt_token_s: float
    prompt_pair_s: float
    completion_token_s: float
    """A token's part of the step that it shares with the rest of the batch."""
    prefill_share: float
    """Of the worker's time, what prompts get beside the answers being written."""

    def seconds(self, demand: Demand) -> float:
        """Of one worker's time, for all of it."""
        return self.prefill_s(demand) + self.completion_token_s * demand.num_completion_tokens

    def prefill_s(self, demand: Demand) -> float:
        """For the prompts alone."""
        return (
            self.request_s * demand.num_requests
            + self.prompt_token_s * demand.num_prompt_tokens
            + self.prompt_pair_s * demand.num_prompt_pairs
        )


def pace_of(weights: Weights, num_decodes: int, num_context_tokens: int, max_slowdown: float) -> Pace | None:
    """``weights`` as in ``wire.Stats``; the batch has ``num_decodes`` sequences that hold ``num_context_tokens``
    together. None while the costs are not known, or are no numbers one can reckon with."""
    if not weights or not all(0.0 <= weight < 1e6 for weight in weights):
        return None
    num_decodes = max(1, num_decodes)

    def of(**amounts: int) -> float:
        return predicted(weights, Work(**amounts)) - weights[0]

    step_s = predicted(weights, Work(num_decodes=num_decodes, num_decode_context_tokens=num_context_tokens))
    return Pace(
        request_s=of(num_chunks=1),
        prompt_token_s=of(num_prefill_tokens=1),
        prompt_pair_s=of(num_prefill_pairs=1),
        completion_token_s=step_s / num_decodes,
        prefill_share=1.0 - 1.0 / max_slowdown if max_slowdown > 1.0 else 1.0,
    )


def demand_of(order: Order) -> Demand:
    """One request's."""
    num_tokens = order.num_prompt_tokens
    return Demand(1.0, num_tokens, pairs(num_tokens, 0), order.num_expected_tokens)


def prefill_of(num_prompt_tokens: int) -> Demand:
    """Of one prompt, without its answer."""
    return Demand(1.0, num_prompt_tokens, pairs(num_prompt_tokens, 0))


class Behind(NamedTuple):
    """One view of what a request waits for."""

    demand: Demand
    """Of those who go before it."""
    part: float
    """Of the workers' time, what they and it have."""
    stream: Demand = NOTHING
    """What comes in a second, goes before it, and has its time from the same part."""


def waits_behind(lanes: Lanes, order: Order, streams: Mapping[str, Stream], now: float) -> list[Behind]:
    """Two views: all that is more important and will come with what the guarantees of the rest leave, and its own class
    on its guarantee alone. ``streams`` by class."""
    own = lanes[order.sla_class]
    num_waiting = len(own)
    mine = NOTHING
    if num_waiting:
        # Tenants take turns: for each of its own requests, and for this one, one of every other tenant's.
        num_own = own.waiting_of(order.tenant_id)
        num_tenants = own.num_tenants + (num_own == 0)
        num_before = min(num_waiting, (num_own + 1) * num_tenants - 1)
        mine = Demand(num_waiting, own.num_prompt_tokens, own.num_prompt_pairs, own.num_expected_tokens)
        mine = mine.times(num_before / num_waiting)
    above, stream, promised = NOTHING, NOTHING, 0.0
    for lane in lanes:
        if lane is own:
            continue
        if lane.terms.priority < own.terms.priority:
            stream = stream.plus(streams[lane.name].per_second(now))
        if not len(lane):
            continue
        if lane.terms.priority <= own.terms.priority:
            demand = Demand(len(lane), lane.num_prompt_tokens, lane.num_prompt_pairs, lane.num_expected_tokens)
            above = above.plus(demand)
        else:
            promised += lane.terms.share
    return [Behind(above.plus(mine), max(0.01, 1.0 - promised), stream), Behind(mine, own.terms.share)]


def wait_s(pace: Pace, behind: Iterable[Behind], order: Order, num_workers: float) -> float:
    """Until a worker has room for it, when none has now. ``num_workers`` > 0: of one that others use too, a part."""
    own = demand_of(order)
    found = []
    for demand, part, stream in behind:
        left = part * num_workers - pace.seconds(stream)
        found.append(pace.seconds(demand.plus(own)) / left if left > 0.0 else math.inf)
    return min(found)  # on its guarantee it comes to its turn in any case


def prefill_s(pace: Pace, pending: Demand, num_prompt_tokens: int, is_beside_answers: bool) -> float:
    """From being sent until the first token, on a worker that has ``pending`` prompts to compute before it."""
    alone_s = pace.prefill_s(pending.plus(prefill_of(num_prompt_tokens))) + pace.completion_token_s
    return alone_s / pace.prefill_share if is_beside_answers else alone_s
