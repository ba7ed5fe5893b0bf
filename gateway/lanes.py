"""The waiting line in front of one model, a lane for each SLA class: how many may wait, how long, and who is next.

The order is policies/priority.py's; here it has flights in it, a clock, and an end: whoever cannot be served in time is
told so at once, and whoever waited as long as its class allows is told then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gateway import errors
from gateway.clock import Clock, Timer
from gateway.flight import Flight
from gateway.telemetry import Errors, ErrorView
from policies.priority import Lane, Lanes, Order, Turn
from policies.promise import NOTHING, Demand, Pace, Stream, demand_of, wait_s, waits_behind
from policies.settings import SlaClass

NUM_REMEMBERED = 512
"""Predictions that came true, or did not, by which the error is told."""


class LaneView(msgspec.Struct, frozen=True):
    """One class of one model, live."""

    model: str
    sla_class: str
    num_waiting: int
    """For a worker, or for the model to be loaded."""
    num_tenants: int
    """Those that wait."""
    oldest_wait_s: float
    predicted_ttft_ms: float | None
    """Of a short request of a tenant that has none waiting; None: not known yet."""
    num_predicted: int
    """Requests of this class whose prediction can be compared with what came, of the last so many."""
    median_error_ms: float | None
    """Of those: how far off, either way."""
    ttft_error: ErrorView
    """Of all of them since start."""
    num_sent: int
    """Since start, as are the three below; out of the line or past it."""
    num_refused_full: int
    num_refused_slow: int
    num_timed_out: int
    num_returning: int = 0
    """They lost their worker, and wait for another one to go on with them."""
    num_suspects: int = 0
    """Of those: they wait to go on apart from each other, or alone, as several workers were lost with them."""
    served_by: Literal["workers", "upstreams"] = "workers"
    """Whose line it is: a model that upstreams relieve has one of each."""


class Record:
    """What became of one class's requests."""

    __slots__ = ("errors", "latest_s", "num_full", "num_sent", "num_slow", "num_timed_out", "timer")

    def __init__(self) -> None:
        self.timer: Timer | None = None
        self.errors = Errors()
        """Predicted less real time to the first token."""
        self.latest_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        """The same, of the last ones."""
        self.num_sent = self.num_full = self.num_slow = self.num_timed_out = 0


class WaitingLine:
    """All flights that wait for one model."""

    def __init__(
        self,
        model: str,
        classes: Mapping[str, SlaClass],
        clock: Clock,
        timed_out: Callable[[], None],
        speed: Callable[[], tuple[Pace | None, float]],
        ahead: Callable[[int], Demand] = lambda priority: NOTHING,
    ) -> None:
        """``timed_out`` is called when somebody's time was up, and the next may be another. ``speed``: a worker's
        pace, if it is known, and how many of them there are, as for ``promise.wait_s``. ``ahead``: what is asked for
        past the line, and goes before all that has this priority."""
        self.lanes = Lanes(classes)
        self._model = model
        self._clock = clock
        self._timed_out = timed_out
        self._speed = speed
        self._ahead = ahead
        self._records = {name: Record() for name in classes}
        self._streams = {name: Stream() for name in classes}
        """What was let in."""

    def __len__(self) -> int:
        return self.lanes.num_waiting

    def enter(self, flight: Flight, pace: Pace | None, num_workers: float, prefill_s: float) -> None:
        """Waits from now on; ``prefill_s`` is what comes after the wait; ``num_workers`` as for ``promise.wait_s``.
        Raises QueueFull and SlowDown; where it has the place of another one, that one hears QueueFull."""
        order = flight.order
        lane = self.lanes[order.sla_class]
        record, terms = self._records[lane.name], lane.terms
        wait = None if pace is None else self._wait_s(pace, order, num_workers)
        aside: Flight | None = None
        if len(lane) >= terms.max_waiting and not flight.is_let_in:
            aside = self._aside_for(order)
            if aside is None:
                record.num_full += 1
                raise self._full(lane, order, pace, num_workers)
        if wait is not None:
            self.check(flight, wait + prefill_s)
        if aside is not None:
            record.num_full += 1
            self.leave(aside)
            aside.fail(self._full(lane, aside.order, pace, num_workers))
        flight.turn = self.lanes.add(order, flight)
        self._streams[lane.name].came(order, self._clock.now())
        self._watch(lane)

    def predicted_s(self, order: Order, pace: Pace | None, num_workers: float, prefill_s: float) -> float | None:
        """Until the first token of a request that would enter now, as far as anything is known; None: there is no room
        for it."""
        lane = self.lanes[order.sla_class]
        if len(lane) >= lane.terms.max_waiting and self._aside_for(order) is None:
            return None
        if pace is None or self._is_empty(lane):
            return prefill_s
        return self._wait_s(pace, order, num_workers) + prefill_s

    def check(self, flight: Flight, ttft_s: float) -> None:
        """Notes what is predicted. Raises SlowDown where that is too late."""
        terms = self.lanes[flight.order.sla_class].terms
        late_s = ttft_s - terms.max_ttft_ms / 1e3
        if terms.max_ttft_ms and late_s > 0 and not flight.is_let_in:
            self._records[flight.order.sla_class].num_slow += 1
            raise errors.SlowDown(
                f"The model '{self._model}' is busy: the first token would come after about {ttft_s:.0f} s, and this "
                f"class of service promises {terms.max_ttft_ms / 1e3:g} s. Please try again later.",
                retry_after_s=max(1.0, late_s),
            )
        flight.expected_at = flight.submitted_at + ttft_s

    def leave(self, flight: Flight) -> None:
        """Nobody wants it any more."""
        assert flight.turn is not None
        self.lanes.remove(flight.turn)

    def next(self) -> tuple[Turn, bool] | None:
        """As ``Lanes.next``; each turn's item is its flight."""
        return self.lanes.next()

    def take(self, turn: Turn, is_claim: bool) -> None:
        """It is sent."""
        self.lanes.take(turn, is_claim)

    def sent(self, flight: Flight) -> None:
        """Out of the line, or past it while nobody waited."""
        order = flight.order
        self._records[order.sla_class].num_sent += 1
        if flight.turn is None:
            self._streams[order.sla_class].came(order, self._clock.now())

    def served(self, flight: Flight, num_tokens: int) -> None:
        """A flight brought so many tokens while others wait."""
        order = flight.order
        self.lanes[order.sla_class].serve(order.tenant_id, order.weight, num_tokens)

    def began(self, flight: Flight, now: float) -> None:
        """Its first token is here: was the prediction right?"""
        if flight.expected_at is not None:
            record, error_s = self._records[flight.order.sla_class], flight.expected_at - now
            record.errors.add(1e3 * error_s)
            record.latest_s.append(error_s)

    def ended(self, flight: Flight) -> None:
        """Nothing more will come of a flight that was sent."""
        if flight.turn is not None:
            self.lanes.done(flight.turn, flight.num_tokens)

    def fail(self, error: errors.GatewayError) -> None:
        """Everybody hears this and leaves."""
        for lane in self.lanes:
            for turn in list(lane.waiting):
                self.lanes.remove(turn)
                turn.item.fail(error)

    def views(
        self, pace: Pace | None, num_workers: float, prefill_s: float, returning: Sequence[Flight] = ()
    ) -> list[LaneView]:
        """Each class as it stands; ``returning``: those without a worker that had one."""
        now = self._clock.now()
        views = []
        for lane in self.lanes:
            record = self._records[lane.name]
            oldest: Turn | None = next(iter(lane.waiting), None)
            order = Order("", lane.name, 1.0, 1, 1, now)
            wait = 0.0
            if pace is not None and not self._is_empty(lane):
                wait = self._wait_s(pace, order, num_workers)
            back = [flight.standing for flight in returning if flight.order.sla_class == lane.name]
            off_s = sorted(map(abs, record.latest_s))
            views.append(
                LaneView(
                    model=self._model,
                    sla_class=lane.name,
                    num_waiting=len(lane),
                    num_tenants=lane.num_tenants,
                    oldest_wait_s=0.0 if oldest is None else now - oldest.item.submitted_at,
                    predicted_ttft_ms=None if pace is None else 1e3 * (wait + prefill_s),
                    num_predicted=len(off_s),
                    median_error_ms=1e3 * off_s[len(off_s) // 2] if off_s else None,
                    ttft_error=record.errors.view(),
                    num_sent=record.num_sent,
                    num_refused_full=record.num_full,
                    num_refused_slow=record.num_slow,
                    num_timed_out=record.num_timed_out,
                    num_returning=len(back),
                    num_suspects=len(back) - back.count("free"),
                )
            )
        return views

    def _aside_for(self, order: Order) -> Flight | None:
        """Who leaves its place in a line that is full to such a request; None: nobody."""
        turns = self.lanes[order.sla_class].aside_for(order.tenant_id)
        return next((turn.item for turn in turns if not turn.item.is_let_in), None)

    def _full(self, lane: Lane, order: Order, pace: Pace | None, num_workers: float) -> errors.QueueFull:
        return errors.QueueFull(
            f"{len(lane)} requests of the class '{lane.name}' wait for the model '{self._model}' already. "
            "Please try again.",
            retry_after_s=1.0 if pace is None else self._turnover_s(pace, lane, order, num_workers),
        )

    def _wait_s(self, pace: Pace, order: Order, num_workers: float) -> float:
        """As ``promise.wait_s``, behind all that goes before it."""
        behind = waits_behind(self.lanes, order, self._streams, self._clock.now())
        ahead = self._ahead(self.lanes[order.sla_class].terms.priority)
        return pace.seconds(ahead) / num_workers + wait_s(pace, behind, order, num_workers)

    def _is_empty(self, lane: Lane) -> bool:
        """Nobody waits whom somebody of this class might have to wait for."""
        return not self.lanes.num_waiting and self._ahead(lane.terms.priority) == NOTHING

    def _again_s(self, lane: Lane, order: Order) -> float:
        """Until a request like this one would be sent in time, as the line stands."""
        pace, num_workers = self._speed()
        if pace is None:
            return 1.0
        return max(1.0, self._wait_s(pace, order, num_workers) - lane.terms.max_wait_s)

    def _turnover_s(self, pace: Pace, lane: Lane, order: Order, num_workers: float) -> float:
        """Until one more of this lane has gone, at the pace that its guarantee gives it."""
        return max(1.0, pace.seconds(demand_of(order)) / (lane.terms.share * num_workers))

    def _watch(self, lane: Lane) -> None:
        """All of a class wait equally long at most, so the time of its oldest is up first."""
        record = self._records[lane.name]
        if record.timer is None and lane.waiting:
            oldest: Flight = next(iter(lane.waiting)).item
            left_s = oldest.submitted_at + lane.terms.max_wait_s - self._clock.now()
            record.timer = self._clock.call_later(max(0.0, left_s), lambda: self._time_out(lane))

    def _time_out(self, lane: Lane) -> None:
        record = self._records[lane.name]
        record.timer = None
        overdue_at = self._clock.now() - lane.terms.max_wait_s
        overdue: list[Flight] = []
        while lane.waiting:
            turn = next(iter(lane.waiting))
            if turn.item.submitted_at > overdue_at:
                break
            self.lanes.remove(turn)
            overdue.append(turn.item)
        record.num_timed_out += len(overdue)
        for flight in overdue:
            flight.fail(
                errors.QueueTimeout(
                    f"No worker had room for the request within {lane.terms.max_wait_s:g} s.",
                    retry_after_s=self._again_s(lane, flight.order),
                )
            )
        self._timed_out()
        self._watch(lane)
