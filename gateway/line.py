"""One model: the line in front of it, its workers, and what passes between them.

A worker is given no more than fills its batch and its memory; the rest waits in the lanes and goes to whichever worker
has room first (late binding). While nobody waits and a worker has room, a request passes the line untouched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway import errors, telemetry
from gateway.adapters import Adapters
from gateway.clock import Clock
from gateway.flight import Flight
from gateway.lanes import LaneView, WaitingLine
from gateway.returning import Returning, lost, why
from gateway.seat import Seat, opaque
from gateway.seats import Seats
from gateway.workers import Worker
from policies import settings, wire
from policies.priority import Order

log = logging.getLogger(__name__)


class Line:
    """The ``Host`` of a model's workers and the ``Keeper`` of its flights."""

    def __init__(
        self,
        name: str,
        model: settings.Model,
        classes: Mapping[str, settings.SlaClass],
        clock: Clock,
        changed: Callable[[], None],
        limits: settings.Workers,
    ) -> None:
        """``changed`` is called when a worker joins or is given up."""
        self.name = name
        self.seats = Seats()
        self.priorities = {name: terms.priority for name, terms in classes.items()}
        """Of the classes."""
        self.shares: dict[int, float] = {}
        """Guaranteed to the classes of each priority together."""
        for terms in classes.values():
            self.shares[terms.priority] = self.shares.get(terms.priority, 0.0) + terms.share
        self.adapters = Adapters(self.seats, self.flights, clock)
        self.adapter = self.adapters.heard
        self._is_leased = True
        """Its workers stay: requests may go there."""
        self._classes = classes
        self._first = min(classes.values(), key=lambda terms: terms.priority)
        """What goes on its class's guarantee goes as one of these: it is not put back for anybody."""
        self._bounded = {name for name, terms in classes.items() if terms.max_ttft_ms}
        self._returning = Returning(limits, self.priorities, clock, self._gave_up_waiting)
        self._waiting = WaitingLine(name, classes, clock, self._advance, self.seats.speed, self._returning.demand)
        self._has_leaving = False
        """A worker that takes nothing more may have flights that could go on elsewhere."""
        self._is_closing = False
        self._has_prefix_cache = model.engine.prefix_cache
        self._max_slowdown = model.engine.max_slowdown
        self._clock = clock
        self._changed = changed

    def ready(self) -> wire.Ready | None:
        """The facts of a ready worker."""
        return self.seats.facts

    def predicted_ttft_s(self, order: Order) -> float | None:
        """Of a request that would come now, as far as the workers' pace is known; None: the line has no room for it."""
        return self._waiting.predicted_s(order, *self.seats.speed(), self.seats.soonest_s(order.num_prompt_tokens))

    def submit(self, request: wire.Submit, order: Order, is_let_in: bool = False) -> Flight:
        """``is_let_in``: with an earlier prompt of the request. Raises QueueFull and SlowDown."""
        priority = self.priorities[order.sla_class]
        if request.priority != priority:
            request = msgspec.structs.replace(request, priority=priority)
        if request.adapter:
            self.adapters.asked(request.adapter)
        flight = Flight(self, request, order, self._clock.now())
        flight.is_let_in = is_let_in
        if len(self.seats) > 1 and self._has_prefix_cache and (facts := self.ready()) is not None:
            flight.name_blocks(facts.block_size, facts.kv_dtype)
        back = self._first_back()
        if (
            self._is_leased
            and not self._waiting.lanes.num_waiting
            and (back is None or priority < self._returning.priority(back))
        ):
            seat = self._seat_for(flight, priority)
            if seat is not None:
                if order.sla_class in self._bounded and seat.pace is not None:
                    self._waiting.check(flight, seat.prefill_s(order.num_prompt_tokens))
                self._send(seat, flight, priority)
                return flight
        self._enter(flight)
        self._advance()
        return flight

    def abandon(self, flight: Flight) -> None:
        """Nobody reads this flight any more."""
        if flight.finished:
            return
        if flight.worker is not None:
            flight.worker.send(wire.Cancel(flight.request.request_id))
            return
        if flight.sent_at is None:
            self._waiting.leave(flight)
        else:
            self._returning.remove(flight)
            self._waiting.ended(flight)
        flight.fail(errors.RequestFailed("The request was cancelled."))
        self._advance()

    def ended_between(self, flight: Flight) -> None:
        """Its last sequence was given up while no worker had it."""
        self._returning.remove(flight)
        self._waiting.ended(flight)
        self._advance()

    def cut(self, error: errors.GatewayError) -> None:
        """Every flight ends here."""
        for flight in self.seats.flights():
            self.abandon(flight)
            flight.cut(error)
        self.fail(error)

    def fail(self, error: errors.GatewayError) -> None:
        """Every flight ends here that no worker has."""
        self._waiting.fail(error)
        self._fail_returning(error)

    def close(self) -> None:
        """The workers are about to end: what they have finishes there, or not at all."""
        self._is_closing = True
        self._has_leaving = False
        self._fail_returning(lost("The worker that computed this answer was lost."))

    def lease(self, is_leased: bool) -> None:
        """Whether requests may go to its workers; meanwhile they wait."""
        self._is_leased = is_leased
        self._advance()

    def rest(self, worker: Worker, is_resting: bool) -> None:
        """One that rests is given nothing; what it has goes on elsewhere as soon as there is room, or ends there."""
        self.seats[worker].is_open = not is_resting
        self._look_for_leaving()
        self._advance()

    def views(self) -> list[LaneView]:
        """Each class as it stands."""
        return self._waiting.views(*self.seats.speed(), self.seats.soonest_s(1), self._returning.all())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._returning)

    @property
    def num_flights(self) -> int:
        return self.num_waiting + sum(len(seat.flights) for seat in self.seats.values())

    # Host of the workers

    def joined(self, worker: Worker) -> None:
        assert worker.facts is not None
        self.seats[worker].joined(worker.facts)
        self.adapters.joined(worker)
        self._advance()
        self._changed()

    def moved(self, worker: Worker, deltas: Sequence[wire.Delta]) -> None:
        seat = self.seats[worker]
        flights, now = seat.flights, self._clock.now()
        others_wait = self._waiting.lanes.num_waiting > 0
        has_freed = False
        for delta in deltas:
            flight = flights.get(delta.request_id)
            if flight is None:
                raise wire.WireError(f"a delta for {delta.request_id}, which it does not hold")
            is_end = flight.arrive(delta, now)
            if flight.is_pending:
                seat.began(flight)
                if delta.token_ids or delta.vector:  # else it was given up before it had any
                    self._waiting.began(flight, now)
                flight.paused_at = None
            if others_wait:
                self._waiting.served(flight, len(delta.token_ids))
            if is_end:
                has_freed = True
                is_gone = not flight.num_here
                seat.ended(flight, 1, is_gone, delta.finish)
                if is_gone:
                    self._let_go(flight, seat)
        if seat.suspects and seat.clear():
            has_freed = True
        if has_freed:
            self._advance()

    def reported(self, worker: Worker) -> None:
        if worker.facts is not None and worker.stats is not None:
            seat = self.seats[worker]
            was_draining = seat.is_draining
            seat.reported(worker.facts, worker.stats, self._max_slowdown)
            if seat.is_draining and not was_draining:
                self._look_for_leaving()
            self.adapters.sweep()
            self._advance()

    def kept(self, worker: Worker, events: wire.KvEvents) -> None:
        self.seats[worker].kept(events)

    def refused(self, worker: Worker, failed: wire.Failed) -> None:
        seat = self.seats[worker]
        flight = seat.flights.get(failed.request_id)
        if flight is None:
            raise wire.WireError(f"a failure of {failed.request_id}, which it does not hold")
        seat.ended(flight, flight.num_here, is_over=True)
        is_full = failed.code == "overloaded" and flight.paused_at is not None
        if is_full or failed.code == "draining":
            seat.is_full |= is_full
            seat.is_draining |= not is_full
            self._look_for_leaving()
            self._let_go(flight, seat)
        else:
            self._reserved_nowhere(flight)
            self._waiting.ended(flight)
            flight.fail(self._refusal(flight, failed), failed)
        self._advance()

    def left(self, worker: Worker) -> None:
        self.adapters.left(worker)
        seat = self.seats[worker]
        flights = seat.flights
        seat.empty()
        if flights:
            log.info("worker %s is lost to %d requests", worker.name, len(flights))
        for flight in flights.values():
            flight.suspicion = flight.suspicion.after_loss(flight.num_tokens, flight.num_open)
            self._let_go(flight, seat)
        self._look_for_leaving()
        self._advance()

    def unseat(self, worker: Worker) -> None:
        """It has ended and none comes after it."""
        self.seats.pop(worker, None)
        self._look_for_leaving()

    def gave_up(self, worker: Worker) -> None:
        del self.seats[worker]
        if not self.seats:
            self.fail(errors.ModelUnavailable(f"The model '{self.name}' cannot be loaded."))
        self._changed()

    def flights(self) -> list[Flight]:
        """All that have not ended."""
        return [
            *(turn.item for lane in self._waiting.lanes for turn in lane.waiting),
            *self._returning.all(),
            *self.seats.flights(),
        ]

    # The line

    def _enter(self, flight: Flight) -> None:
        """Into its lane, if it may and if it is any use."""
        self._waiting.enter(flight, *self.seats.speed(), self.seats.soonest_s(flight.order.num_prompt_tokens))

    def _advance(self) -> None:
        """Sends whose turn it is while there is room for it; a wide request waits for it, and nobody overtakes. Of a
        class, those go first whose worker was lost, then those whose worker leaves."""
        waiting, returning = self._waiting, self._returning
        while self._is_leased:
            turn = waiting.next() if waiting.lanes.num_waiting else None
            ceiling = math.inf if turn is None else turn[0].lane.terms.priority
            back = self._first_back()
            if back is not None and returning.priority(back) <= ceiling:
                seat = self._seat_for(back, back.request.priority)
                if seat is None:
                    return
                returning.remove(back)
                self._send(seat, back, back.request.priority)
            elif self._has_leaving and self._move_one(ceiling):
                pass
            elif turn is None:
                return
            else:
                flight: Flight = turn[0].item
                priority = self._first.priority if turn[1] else flight.request.priority
                seat = self._seat_for(flight, priority)
                if seat is None:
                    return
                waiting.take(*turn)
                self._send(seat, flight, priority)

    def _seat_for(self, flight: Flight, priority: int) -> Seat | None:
        """Of the workers that have room, the one where its first token should come soonest."""
        return self.seats.best(flight, priority, self.adapters.refuses)

    def _send(self, seat: Seat, flight: Flight, priority: int) -> None:
        is_first, now = flight.sent_at is None, self._clock.now()
        flight.sent(now)
        order, request = flight.order, flight.request
        if is_first and priority != request.priority:
            flight.due_at = now + self._first.ttft_ms / 1e3
        flight.request = msgspec.structs.replace(
            request,
            priority=priority,
            ttft_s=flight.due_at - now,
            tpot_s=self._classes[order.sla_class].tpot_ms / 1e3,
            tenant=opaque(order.tenant_id),
            weight=order.weight,
        )
        if is_first:
            self._waiting.sent(flight)
        seat.give(flight)

    # From one worker to another

    def _let_go(self, flight: Flight, seat: Seat) -> None:
        """Its worker has it no more. What has not finished goes on elsewhere, if anybody waits for it."""
        self._reserved_nowhere(flight)
        if flight.is_wanted:
            flight.leave(seat.eos_token_ids, self._clock.now())
            if flight.num_open and self._returning.may_return(flight) and not self._is_closing:
                return self._returning.add(flight)
        if flight.num_open:
            flight.fail(why(flight))
        self._waiting.ended(flight)
        return None

    def _first_back(self) -> Flight | None:
        """Who goes on next, of those that a worker admits."""
        if not len(self._returning):
            return None
        return self._returning.first(self.seats.admit)

    def _refusal(self, flight: Flight, failed: wire.Failed) -> errors.GatewayError:
        if flight.paused_at is None or failed.code == "internal":
            return errors.RequestFailed.of(failed, flight.request)
        # It was right when it was let in: whoever cannot go on with it is another kind of worker.
        log.error("this request cannot go on elsewhere: %s", failed.reason, extra=telemetry.about_sent(flight.request))
        return lost("The worker that computed this answer was lost, and the next one could not go on with it.")

    def _move_one(self, ceiling: float) -> bool:
        """Has a worker that leaves let go of a flight, if another one has room for it and its class is important
        enough. Whether there was one."""
        movable = [flight for flight in self.seats.leaving() if self._returning.priority(flight) <= ceiling]
        for flight in sorted(movable, key=self._returning.place):
            target = self._seat_for(flight, flight.request.priority)
            if target is not None:
                target.reserve(flight)
                flight.is_moving = True
                assert flight.worker is not None
                flight.worker.send(wire.Cancel(flight.request.request_id))
                return True
        return False

    def _look_for_leaving(self) -> None:
        self._has_leaving = self.seats.has_leaving and not self._is_closing

    def _reserved_nowhere(self, flight: Flight) -> None:
        if flight.is_moving:
            self.seats.release(flight)

    def _gave_up_waiting(self, flight: Flight) -> None:
        """No worker went on with it in time."""
        self._waiting.ended(flight)
        flight.fail(lost("The worker that computed this answer was lost, and no other could go on with it in time."))
        self._advance()

    def _fail_returning(self, error: errors.GatewayError) -> None:
        for flight in self._returning.all():
            self._returning.remove(flight)
            self._waiting.ended(flight)
            flight.fail(error)
