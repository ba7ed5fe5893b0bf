"""One model in a simulation: its line (policies/priority.py), its promise (policies/promise.py) and its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies import promise
from policies.batching import Limits
from policies.costs import StepCosts
from policies.priority import Lane, Lanes, Order, Turn
from policies.promise import Demand
from policies.room import Room
from policies.settings import SlaClass
from policies.simulation.gaps import Gaps
from policies.simulation.meter import Ticket
from policies.simulation.trial import Arrival, Reason, WorkerModel
from policies.simulation.worker import NO_PROMISE, Promise, Simulated, Worker


class Job:
    """One request that its limits have let in."""

    __slots__ = (
        "arrival",
        "at",
        "num_written",
        "order",
        "own_priority",
        "predicted_ttft_s",
        "seat",
        "sent_at",
        "sequence",
        "ticket",
        "turn",
        "was_cut",
    )

    def __init__(self, arrival: Arrival, at: float, order: Order, ticket: Ticket) -> None:
        self.arrival = arrival
        self.at = at
        self.order = order
        self.ticket = ticket
        self.turn: Turn | None = None
        self.seat: Seat | None = None
        self.sent_at = 0.0
        self.sequence: Simulated | None = None
        self.own_priority = 0
        self.predicted_ttft_s = 0.0
        """When it was let in."""
        self.num_written = 0
        self.was_cut = False


class Seat:
    """A worker and what the gateway knows of it."""

    def __init__(self, model: WorkerModel, shares: Mapping[int, float], allowance: Callable[[Simulated], int]) -> None:
        limits = Limits(
            max_step_tokens=model.max_step_tokens,
            max_prefill_tokens_beside_decodes=model.max_prefill_tokens_beside_decodes,
            max_sequences=max(1, min(model.max_sequences, model.max_step_tokens - 1)),
            max_slowdown=model.max_slowdown,
            max_preemptions=model.max_preemptions,
        )
        self.worker = Worker(limits, model.num_blocks, model.block_size, StepCosts.of(model.weights), allowance)
        self.room = Room(shares, model.max_sequences, model.num_blocks * model.block_size)
        self.is_called = False
        """It was idle, and begins in a moment with all that comes at this instant."""
        self.num_context_tokens = 0
        """Those that the ones that write hold."""
        self.num_decodes = 0
        self.pending = promise.NOTHING
        """Prompts that no first token has shown to be computed."""

    def send(self, job: Job, priority: int, own: int, promised: Promise, now: float) -> None:
        """``own``: the priority of its class, however important it is sent."""
        arrival, order = job.arrival, job.order
        num_written = min(arrival.num_completion_tokens, job.ticket.max_completion_tokens)
        job.seat, job.sent_at = self, now
        num_prompt_tokens, num_cached_tokens = arrival.num_prompt_tokens, arrival.num_cached_tokens
        job.sequence = Simulated(job, priority, num_prompt_tokens, num_cached_tokens, num_written, promised)
        self.room.give(priority, own, 1, order.num_tokens)
        job.own_priority = own
        self.pending = self.pending.plus(promise.prefill_of(order.num_prompt_tokens))
        self.worker.submit(job.sequence, now)

    def began(self, job: Job) -> None:
        """Its first token has come."""
        self.num_decodes += 1
        self.num_context_tokens += job.order.num_prompt_tokens
        self.pending = self.pending.plus(promise.prefill_of(job.order.num_prompt_tokens).times(-1.0))

    def wrote(self, num_tokens: int) -> None:
        """One that writes has gone on."""
        self.num_context_tokens += num_tokens

    def left(self, job: Job) -> None:
        """It has ended after its first token."""
        assert job.sequence is not None
        self.room.give(job.sequence.priority, job.own_priority, -1, -job.order.num_tokens)
        self.num_decodes -= 1
        self.num_context_tokens -= job.order.num_prompt_tokens + job.num_written


class Line:
    """Who waits for one model, and who computes it."""

    def __init__(
        self, model: WorkerModel, classes: Mapping[str, SlaClass], allowance: Callable[[Simulated], int]
    ) -> None:
        self.lanes = Lanes(classes)
        self.streams = {name: promise.Stream() for name in classes}
        self.gaps = Gaps(self.lanes)
        shares: dict[int, float] = {}
        for terms in classes.values():
            shares[terms.priority] = shares.get(terms.priority, 0.0) + terms.share
        self._first = min(classes.values(), key=lambda terms: terms.priority)
        self.seats = [Seat(model, shares, allowance) for _ in range(model.replicas)]
        self._model = model

    def fits(self, arrival: Arrival) -> bool:
        """Whether an empty worker can hold it to its end."""
        num_tokens = arrival.num_prompt_tokens + arrival.num_completion_tokens
        return -(-num_tokens // self._model.block_size) <= self._model.num_blocks

    def free_seat(self, order: Order) -> Seat | None:
        """Where it goes at once, past the line: nobody waits and a worker has room."""
        if self.lanes.num_waiting:
            return None
        return self.seat_for(order, self.lanes[order.sla_class].terms.priority)

    def refusal(self, order: Order, seat: Seat | None, predicted_ttft_s: float) -> Reason | None:
        """Why it may not come: its class's line is full, or its first token would come too late. ``seat``: where it
        goes at once; None: it waits."""
        lane = self.lanes[order.sla_class]
        if seat is None and self.is_full(lane) and not lane.aside_for(order.tenant_id):
            return "queue_full"
        if lane.terms.max_ttft_ms and 1e3 * predicted_ttft_s > lane.terms.max_ttft_ms:
            return "slow_down"
        return None

    def aside_for(self, order: Order) -> Job | None:
        """Who leaves its place in the line to such a request, which may come."""
        lane = self.lanes[order.sla_class]
        if not self.is_full(lane):
            return None
        job = lane.aside_for(order.tenant_id)[0].item
        assert isinstance(job, Job)
        return job

    @staticmethod
    def is_full(lane: Lane) -> bool:
        return len(lane) >= lane.terms.max_waiting

    def predicted_ttft_s(self, order: Order, seat: Seat | None, now: float) -> float:
        """``seat``: where it would be sent at once; None: it waits."""
        model, num_seats = self._model, len(self.seats)
        num_decodes = sum(each.num_decodes for each in self.seats) // num_seats
        num_context = sum(each.num_context_tokens for each in self.seats) // num_seats
        pace = promise.pace_of(model.weights, num_decodes, num_context, model.max_slowdown)
        assert pace is not None
        if seat is not None:
            return promise.prefill_s(pace, seat.pending, order.num_prompt_tokens, seat.num_decodes > 0)
        wait_s = promise.wait_s(pace, promise.waits_behind(self.lanes, order, self.streams, now), order, num_seats)
        return wait_s + promise.prefill_s(pace, Demand(), order.num_prompt_tokens, num_decodes > 0)

    def seat_for(self, order: Order, priority: int) -> Seat | None:
        """The one with the fewest open sequences that has room."""
        able = [seat for seat in self.seats if seat.room.has_room(priority, 1, order.num_tokens)]
        return min(able, key=lambda seat: seat.worker.num_sequences, default=None)

    def add(self, job: Job) -> None:
        """It waits from now on."""
        job.turn = self.lanes.add(job.order, job)
        self.gaps.added(job.turn)

    def remove(self, turn: Turn) -> None:
        """It waits no longer."""
        self.lanes.remove(turn)
        self.gaps.left(turn.lane)

    def done(self, job: Job) -> None:
        """Its answer has ended."""
        if job.turn is not None:
            self.gaps.done(job.turn, job.num_written)
            self.lanes.done(job.turn, job.num_written)

    def send_next(self, now: float) -> tuple[Seat, Job] | None:
        """Whoever goes next, if a worker has room for it."""
        chosen = self.lanes.next()
        if chosen is None:
            return None
        turn, is_claim = chosen
        # Sent on its class's guarantee it is not put back for anybody.
        priority = self._first.priority if is_claim else turn.lane.terms.priority
        seat = self.seat_for(turn.order, priority)
        if seat is None:
            return None
        self.lanes.take(turn, is_claim)
        self.gaps.taken(turn)
        job = turn.item
        assert isinstance(job, Job)
        self.send(seat, job, priority, now)
        return seat, job

    def send(self, seat: Seat, job: Job, priority: int, now: float) -> None:
        """To this worker, with what is left of its promise."""
        order, terms = job.order, self.lanes[job.order.sla_class].terms
        promised = NO_PROMISE._replace(tenant=order.tenant_id.encode(), weight=order.weight)
        if self._model.promises:
            is_claim = priority != terms.priority
            ttft_s = self._first.ttft_ms / 1e3 if is_claim else order.deadline_at - now
            promised = promised._replace(ttft_s=ttft_s, tpot_s=terms.tpot_ms / 1e3)
        seat.send(job, priority, terms.priority, promised, now)
