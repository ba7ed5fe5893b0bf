"""A worker as dispatch sees it: what it holds, and whether it has room for more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

from gateway.flight import Flight
from gateway.stays import Stay
from gateway.workers import Worker
from policies import wire
from policies.costs import pairs
from policies.promise import NOTHING, Demand, Pace, pace_of, prefill_s
from policies.room import Amount, Room
from policies.routing import Candidate, PrefixIndex
from policies.suspicion import may_join


@lru_cache(4096)
def opaque(tenant_id: str) -> bytes:
    """The same to all gateways, and to a worker no name."""
    return blake2b(tenant_id.encode(), digest_size=8, person=b"penstock tenant").digest()


class Seat:
    """A place for a worker, and the flights that it holds."""

    __slots__ = (
        "_index",
        "_leaving",
        "_max_tokens",
        "_num_expected",
        "_num_given_tokens",
        "_priorities",
        "_reserved",
        "_room",
        "_shares",
        "eos_token_ids",
        "flights",
        "is_draining",
        "is_full",
        "is_open",
        "num_pending_pairs",
        "num_pending_requests",
        "num_pending_tokens",
        "num_sequences",
        "pace",
        "part",
        "suspects",
        "worker",
    )

    def __init__(
        self, worker: Worker, priorities: Mapping[str, int], shares: Mapping[int, float], num_gateways: int = 1
    ) -> None:
        """``priorities`` of the classes; ``shares`` as for ``Room``; ``num_gateways`` that send there, until it has
        told how many they are."""
        self.worker = worker
        self._num_expected = num_gateways
        self.is_open = True
        """It is given requests; else its flights move elsewhere as there is room, or finish here."""
        self.eos_token_ids: frozenset[int] = frozenset()
        """Of the model, by the worker that was here last."""
        self._priorities = priorities
        self._shares = shares
        self.empty()

    def empty(self) -> None:
        """Nobody sits here; whatever was held is lost."""
        self.flights: dict[str, Flight] = {}
        self.suspects: set[Flight] = set()
        """Those of them that must be apart, or alone."""
        self.num_sequences = 0
        """Open sequences of its flights."""
        self.num_pending_requests = 0
        """Those that have brought no token yet, as are the next two."""
        self.num_pending_tokens = 0
        self.num_pending_pairs = 0
        self.pace: Pace | None = None
        """None until the worker has told what its steps cost."""
        self.part = 1.0 / self._num_expected
        """Of what it does, what it does for this gateway."""
        self.is_draining = False
        """The worker takes no more requests, as it has said."""
        self.is_full = False
        """It had no room for one that returned, as it said since its last report."""
        self._reserved: dict[str, tuple[int, int, int, int]] = {}
        """What flights on their way from another worker will take, as ``Room.give`` was told."""
        self._room: Room | None = None
        self._index = PrefixIndex(0)
        self._leaving: list[list[bytes]] = []
        """Blocks of flights that are over, until the worker has told what became of them."""
        self._num_given_tokens = 0
        self._max_tokens = 0

    def joined(self, facts: wire.Ready) -> None:
        """A worker sits here now."""
        self._max_tokens = facts.num_blocks * facts.block_size
        self.eos_token_ids = frozenset(facts.eos_token_ids)
        self._index = PrefixIndex(facts.num_blocks)
        self._room = Room(self._shares, facts.max_sequences, self._max_tokens, self._num_expected)

    def reported(self, facts: wire.Ready, stats: wire.Stats, max_slowdown: float) -> None:
        """It has told how it stands."""
        assert self._room is not None
        for digests in self._leaving:
            self._index.forget(digests)
        self._leaving.clear()
        self.is_draining, self.is_full = self.is_draining or stats.draining, False
        num_context_tokens = stats.num_used_blocks * facts.block_size
        # Prompts that begin alike share their memory, so what it uses may be less than what it was given.
        free = Amount(facts.max_sequences - stats.num_running, self._max_tokens - num_context_tokens)
        self._room.reported(stats.num_gateways, None if stats.num_waiting else free, stats.num_idle)
        self.part = self._part(stats)
        self.pace = pace_of(stats.cost_weights, stats.num_running, num_context_tokens, max_slowdown)

    def kept(self, events: wire.KvEvents) -> None:
        """Blocks of its prefix cache came and went."""
        if not self._index.update(events.stored, events.evicted):
            raise wire.WireError(f"{len(self._index)} blocks are kept, which are more than there are")

    def candidate(self, flight: Flight) -> Candidate:
        """What speaks for sending it here."""
        num_blocks, num_matched_tokens = self._matched(flight)
        num_sharing = self._index.num_expecting(flight.digests[num_blocks - 1]) if num_blocks else 0
        return Candidate(
            num_matched_tokens, self.num_pending_tokens, self.num_sequences, self._num_given_tokens, num_sharing
        )

    @property
    def pending(self) -> Demand:
        """The prompts that it has still to compute."""
        return Demand(self.num_pending_requests, self.num_pending_tokens, self.num_pending_pairs)

    def admits(self, flight: Flight) -> bool:
        """A worker is here that takes requests, and neither is this one kept from those that it has, nor they from
        this one."""
        if self._room is None or self.is_draining or not self.is_open:
            return False
        if not self.suspects and not flight.suspicion.num_losses:
            return True
        num_there = len(self.flights) + len(self._reserved)
        return may_join(flight.standing, num_there, [suspect.standing for suspect in self.suspects])

    def has_room(self, flight: Flight, priority: int) -> bool:
        """For its open sequences and what they hold together."""
        if self.is_full or not self.admits(flight):
            return False
        assert self._room is not None
        return self._room.has_room(priority, flight.num_open, flight.num_held_tokens)

    def clear(self) -> bool:
        """Whoever has got ahead of where workers were lost is above suspicion again; whether there was one."""
        ahead = {flight for flight in self.suspects if flight.standing == "free"}
        self.suspects -= ahead
        return bool(ahead)

    @property
    def takes_requests(self) -> bool:
        """Where somebody sits."""
        return self.is_open and not self.is_draining

    def reserve(self, flight: Flight) -> None:
        """Keeps room for it, until it comes or goes elsewhere."""
        assert self._room is not None
        own = self._priorities[flight.order.sla_class]
        place = flight.request.priority, own, flight.num_open, flight.num_held_tokens
        self._reserved[flight.request.request_id] = place
        self._room.give(*place)

    def release(self, flight: Flight) -> None:
        """What was kept for it, if anything was."""
        place = self._reserved.pop(flight.request.request_id, None)
        if place is not None and self._room is not None:
            priority, own, num_sequences, num_tokens = place
            self._room.give(priority, own, -num_sequences, -num_tokens)

    def give(self, flight: Flight) -> None:
        """Sends it there."""
        assert self._room is not None
        request, num_sequences = flight.request, flight.num_open
        own = self._priorities[flight.order.sla_class]
        self._room.give(request.priority, own, num_sequences, flight.num_held_tokens)
        self.flights[request.request_id] = flight
        if flight.suspicion.num_losses and flight.standing != "free":
            self.suspects.add(flight)
        self.num_sequences += num_sequences
        num_missing_tokens = flight.num_known_tokens
        if flight.digests:
            num_missing_tokens -= self._matched(flight)[1]
            self._index.expect(flight.digests)
        flight.num_missing_tokens = num_missing_tokens
        flight.num_missing_pairs = pairs(num_missing_tokens, 0)
        self._num_given_tokens += num_missing_tokens
        self.num_pending_requests += 1
        self.num_pending_tokens += num_missing_tokens
        self.num_pending_pairs += flight.num_missing_pairs
        flight.is_pending = True
        flight.worker = flight.given_to = self.worker
        self.worker.send(flight.submit())
        if flight.stays is not None:
            flight.stays.append(Stay(self.worker.name, flight.given_at, time.monotonic(), flight.num_tokens))

    def began(self, flight: Flight) -> None:
        """Its prompt is computed, or will never be."""
        flight.is_pending = False
        self.num_pending_requests -= 1
        self.num_pending_tokens -= flight.num_missing_tokens
        self.num_pending_pairs -= flight.num_missing_pairs

    def ended(self, flight: Flight, num_sequences: int, is_over: bool, finish: wire.Finish | None = None) -> None:
        """So many more of its sequences are over, as ``finish`` tells of one; if the whole flight is, its memory is
        free."""
        if finish is not None:
            self.worker.phases.ended(finish)
        assert self._room is not None
        order = flight.order
        num_tokens = flight.num_held_tokens if is_over else 0
        self._room.give(flight.request.priority, self._priorities[order.sla_class], -num_sequences, -num_tokens)
        self.num_sequences -= num_sequences
        if is_over:
            if flight.is_pending:
                self.began(flight)
            if flight.digests:
                self._leaving.append(flight.digests)
            flight.worker = None
            self.suspects.discard(flight)
            del self.flights[flight.request.request_id]

    def prefill_s(self, num_prompt_tokens: int) -> float:
        """From being sent here, after all that it has to do, until the first token."""
        if self.pace is None:
            return 0.0
        is_beside_answers = self.num_sequences > self.num_pending_requests
        # Other gateways that use it have prompts to compute there, too, as far as we know in the same proportion.
        pending = self.pending.times(1.0 / self.part) if self.num_pending_requests else NOTHING
        return prefill_s(self.pace, pending, num_prompt_tokens, is_beside_answers)

    def _matched(self, flight: Flight) -> tuple[int, int]:
        """Blocks of its prompt that are there or about to be, and their tokens."""
        facts = self.worker.facts
        num_blocks = 0 if facts is None else self._index.match(flight.digests)
        return num_blocks, 0 if facts is None else num_blocks * facts.block_size

    def _part(self, stats: wire.Stats) -> float:
        """As many places fall free for us as we have of them, and at least our part."""
        if stats.num_gateways <= 1:
            return 1.0
        num_open = max(1, self.num_sequences, stats.num_running + stats.num_waiting)
        return max(1.0 / stats.num_gateways, self.num_sequences / num_open)
