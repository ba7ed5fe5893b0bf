"""A worker as dispatch sees it: what it holds, and whether it has room for more."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.flight import Flight
from gateway.workers import Worker
from policies import wire
from policies.costs import pairs
from policies.promise import Demand, Pace, pace_of

OVERCOMMIT = 16
"""A worker holds one sequence in this many beyond its batch: a place that falls free is taken in the next step."""
MAX_DISPLACED = 2
"""So many times that may be given to it when some of it steps back in the engine for what is more important."""


class Held:
    """What a worker was given of one importance and has not finished."""

    __slots__ = ("num_sequences", "num_tokens")

    def __init__(self) -> None:
        self.num_sequences = 0
        self.num_tokens = 0


class Seat:
    """A worker and the flights it holds.

    A worker is full when its batch is, or its KV memory. Whoever is more important than some of what it holds may still
    be sent: the engine makes room. But each class keeps, of places and memory, its guaranteed share of what it has
    there, so that those who step back are some and never all.
    """

    __slots__ = (
        "_held",
        "_max_sequences",
        "_max_tokens",
        "_num_tokens",
        "_num_unseen_tokens",
        "_num_unseen_tokens_before",
        "_places",
        "_shares",
        "flights",
        "is_open",
        "num_pending_pairs",
        "num_pending_requests",
        "num_pending_tokens",
        "num_sequences",
        "pace",
        "worker",
    )

    def __init__(self, worker: Worker, shares: Mapping[int, float]) -> None:
        """``shares``: guaranteed to the classes of each priority together."""
        self.worker = worker
        self._shares = shares
        self.is_open = True
        """It is given requests; else it only finishes what it has."""
        self._max_sequences = self._max_tokens = self._places = 0
        self.empty()

    def empty(self) -> None:
        """Whatever it held is lost."""
        self.flights: dict[str, Flight] = {}
        self.num_sequences = 0
        """Open sequences of its flights."""
        self.num_pending_requests = 0
        """Those that have brought no token yet, as are the next two."""
        self.num_pending_tokens = 0
        self.num_pending_pairs = 0
        self.pace: Pace | None = None
        """None until the worker has told what its steps cost."""
        self._held: dict[int, Held] = {}
        self._num_tokens = self._num_unseen_tokens = self._num_unseen_tokens_before = 0

    def joined(self, facts: wire.Ready) -> None:
        """A worker sits here now."""
        self._places = facts.max_sequences
        self._max_sequences = facts.max_sequences + max(1, facts.max_sequences // OVERCOMMIT)
        self._max_tokens = facts.num_blocks * facts.block_size

    def reported(self, facts: wire.Ready, stats: wire.Stats, max_slowdown: float) -> None:
        """It has told how it stands. What was sent since the report before may not be in it yet."""
        self._num_unseen_tokens_before, self._num_unseen_tokens = self._num_unseen_tokens, 0
        num_context_tokens = stats.num_used_blocks * facts.block_size
        self.pace = pace_of(stats.cost_weights, stats.num_running, num_context_tokens, max_slowdown)

    @property
    def pending(self) -> Demand:
        """The prompts that it has still to compute."""
        return Demand(self.num_pending_requests, self.num_pending_tokens, self.num_pending_pairs)

    def has_room(self, num_sequences: int, num_tokens: int, priority: int) -> bool:
        """For so many sequences that hold ``num_tokens`` together. More than ever fit go to a worker that has nothing
        else to do: it takes them in turns."""
        if self.worker.facts is None or not self.is_open:
            return False
        if self.num_sequences == 0:
            return True
        if self.num_sequences + num_sequences <= self._max_sequences and self._has_memory(num_tokens):
            return True
        return self._may_displace(num_sequences, num_tokens, priority)

    def give(self, flight: Flight) -> None:
        """Sends it there."""
        request, order = flight.request, flight.order
        num_tokens = order.num_tokens
        self.flights[request.request_id] = flight
        held = self._held.get(request.priority)
        if held is None:
            held = self._held[request.priority] = Held()
        held.num_sequences += flight.num_sequences
        held.num_tokens += num_tokens
        self.num_sequences += flight.num_sequences
        self._num_tokens += num_tokens
        self._num_unseen_tokens += num_tokens
        self._count_pending(order.num_prompt_tokens, 1)
        flight.is_pending = True
        flight.worker = self.worker
        self.worker.send(request)

    def began(self, flight: Flight) -> None:
        """Its prompt is computed, or will never be."""
        flight.is_pending = False
        self._count_pending(flight.order.num_prompt_tokens, -1)

    def ended(self, flight: Flight, num_sequences: int, is_over: bool) -> None:
        """So many more of its sequences are over; if the whole flight is, its memory is free."""
        held = self._held[flight.request.priority]
        held.num_sequences -= num_sequences
        self.num_sequences -= num_sequences
        if is_over:
            held.num_tokens -= flight.order.num_tokens
            self._num_tokens -= flight.order.num_tokens
            if flight.is_pending:
                self.began(flight)
            flight.worker = None
            del self.flights[flight.request.request_id]

    def _count_pending(self, num_tokens: int, sign: int) -> None:
        self.num_pending_requests += sign
        self.num_pending_tokens += sign * num_tokens
        self.num_pending_pairs += sign * pairs(num_tokens, 0)

    def _has_memory(self, num_tokens: int) -> bool:
        """By what was sent; or, as prompts that begin alike share their memory, by what the worker last told."""
        if self._num_tokens + num_tokens <= self._max_tokens:
            return True
        facts, stats = self.worker.facts, self.worker.stats
        if facts is None or stats is None or stats.num_waiting:
            return False
        num_seen_tokens = stats.num_used_blocks * facts.block_size
        num_unseen_tokens = self._num_unseen_tokens + self._num_unseen_tokens_before
        return num_seen_tokens + num_unseen_tokens + num_tokens <= self._max_tokens

    def _may_displace(self, num_sequences: int, num_tokens: int, priority: int) -> bool:
        if self.num_sequences + num_sequences > MAX_DISPLACED * self._max_sequences:
            return False
        is_less_important = False
        for other, held in self._held.items():
            if other <= priority or not held.num_sequences:
                num_sequences += held.num_sequences
                num_tokens += held.num_tokens
            else:
                is_less_important = True
                share = self._shares.get(other, 0.0)
                num_sequences += min(held.num_sequences, max(1, int(share * self._places)))
                num_tokens += min(held.num_tokens, int(share * self._max_tokens))
        return is_less_important and num_sequences <= self._places and num_tokens <= self._max_tokens
