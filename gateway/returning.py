"""Answers whose worker was lost, or let them go, until another one goes on with them: in what order, and for how long.

They had their turn in the line and paid for it, so they need no other: among those of their class, and before those of
classes that are less important, they go first. One that must go on alone goes before everybody: a worker that has just
come is the only one that has nothing to do.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections.abc import Callable, Mapping

from gateway import errors, telemetry
from gateway.clock import Clock, Timer
from gateway.flight import Flight
from policies import settings
from policies.costs import pairs
from policies.promise import Demand

log = logging.getLogger(__name__)


class Returning:
    """Those of one model. Each stays until it is taken, given up by its reader, or for ``failover_wait_s``."""

    def __init__(
        self,
        limits: settings.Workers,
        priorities: Mapping[str, int],
        clock: Clock,
        timed_out: Callable[[Flight], None],
    ) -> None:
        """``priorities`` of the classes. ``timed_out`` is called with one that has left for this reason."""
        self._limits = limits
        self._priorities = priorities
        self._clock = clock
        self._timed_out = timed_out
        self._waiting: list[Flight] = []
        self._timers: dict[Flight, Timer] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def may_return(self, flight: Flight) -> bool:
        """It has not lost more workers than the settings allow."""
        return flight.suspicion.num_losses <= self._limits.max_failovers

    def add(self, flight: Flight) -> None:
        """Waits from now on; the time that it may take counts from when it last moved."""
        assert flight.paused_at is not None
        insort(self._waiting, flight, key=self.place)
        left_s = flight.paused_at + self._limits.failover_wait_s - self._clock.now()
        self._timers[flight] = self._clock.call_later(max(0.0, left_s), lambda: self._time_out(flight))

    def first(self, is_admitted: Callable[[Flight], bool]) -> Flight | None:
        """Who goes next of those that are admitted somewhere."""
        return next(filter(is_admitted, self._waiting), None)

    def remove(self, flight: Flight) -> None:
        """It goes on, or nobody wants it any more."""
        self._waiting.remove(flight)
        self._timers.pop(flight).cancel()

    def all(self) -> list[Flight]:
        return list(self._waiting)

    def priority(self, flight: Flight) -> float:
        """That of its class, or before all of them."""
        return -math.inf if flight.standing == "alone" else self._priorities[flight.order.sla_class]

    def demand(self, priority: float) -> Demand:
        """What those ask for that go before all of this priority."""
        num_requests = num_prompt = num_pairs = num_left = 0
        for flight in self._waiting:
            if self.priority(flight) > priority:
                break
            num_known = flight.num_known_tokens
            num_requests += 1
            num_prompt += num_known
            num_pairs += pairs(num_known, 0)
            num_left += max(0, flight.order.num_expected_tokens - flight.num_tokens)
        return Demand(num_requests, num_prompt, num_pairs, num_left)

    def place(self, flight: Flight) -> tuple[float, float]:
        """By which they are ordered, smaller first."""
        return self.priority(flight), flight.submitted_at

    def _time_out(self, flight: Flight) -> None:
        self.remove(flight)
        self._timed_out(flight)


def why(flight: Flight) -> errors.GatewayError:
    """A flight that lost its worker ends."""
    if not flight.suspicion.is_proven:
        return lost("The worker that computed this answer was lost.")
    log.error("this request has ended a worker that had no other", extra=telemetry.about_sent(flight.request))
    num_losses = flight.suspicion.num_losses
    return errors.EndsWorkers(f"{num_losses} workers were lost over this request, of which the last had no other.")


def lost(what: str) -> errors.WorkerLost:
    return errors.WorkerLost(f"{what} Please try again.", retry_after_s=1.0)
