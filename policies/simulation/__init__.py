"""What would have happened: arrivals replayed through the real policy code, on workers that compute nothing.

Limits and budgets (rate, admission, pricing), classes and tiers, the line (priority), the promise and the plan of each
step (batching) are the functions that the gateway and the worker run; only time is made up, by the fitted costs of a
step. Nothing is drawn by chance: the same trial has the same outcome. What it leaves out: exact answers given twice,
blocks shared between the requests of a batch, requests for several answers (they count as one long one), and the time
that gateway and network take.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from policies.policy import Policy, narrowed
from policies.pricelist import PriceList
from policies.priority import Order
from policies.simulation.line import Job, Line, Seat
from policies.simulation.meter import Meter
from policies.simulation.tally import Tallies
from policies.simulation.trial import (
    MAX_ARRIVALS,
    Arrival,
    ClassPart,
    NarrowedKey,
    Outcome,
    Part,
    Percentiles,
    Reason,
    Trial,
    WorkerModel,
)
from policies.simulation.worker import Simulated
from policies.terms import Usage
from policies.tiers import class_for

__all__ = [
    "MAX_ARRIVALS",
    "Arrival",
    "ClassPart",
    "NarrowedKey",
    "Outcome",
    "Part",
    "Percentiles",
    "Reason",
    "TooMuch",
    "Trial",
    "WorkerModel",
    "check",
    "run",
]

MAX_STEPS = 500_000
"""Of all workers together: more is not computed."""
RENEW_S = 20.0
"""How often open requests renew what they hold of a limit."""


class TooMuch(Exception):
    """The trial would take too long; the message says what to ask less of."""


def check(trial: Trial) -> list[str]:
    """The fields, by their path, with which it cannot be run; empty when it can."""
    wrong = [] if len(trial.arrivals) <= MAX_ARRIVALS else ["arrivals"]
    if not trial.arrivals:
        wrong.append("arrivals")
    wrong += [
        f"policies.{tenant}.{field}"
        for tenant, policy in trial.policies.items()
        for field, names in (("sla_class", (policy.sla_class,)), ("sla_classes", policy.sla_classes))
        if any(name not in trial.classes for name in names)
    ]
    wrong += [
        f"arrivals.{index}.tenant"
        for index, arrival in enumerate(trial.arrivals)
        if arrival.tenant not in trial.policies
    ][:10]
    return wrong


def run(trial: Trial) -> Outcome:
    """Raises TooMuch. ``check`` must find nothing wrong with it."""
    return _Run(trial).outcome()


class _Run:
    """One trial on its way: what happens next, in order of time."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_steps = self._num_open = 0
        self._meter = Meter(trial.completion_estimate, trial.starts_at, PriceList(trial.prices))
        self._narrowed: dict[tuple[str, str], Policy] = {}
        self._tallies = Tallies(trial.classes)
        self._lines = {
            name: Line(model, trial.classes, self._allowance) for name, model in sorted(trial.workers.items())
        }
        self._arrivals = iter(sorted(enumerate(trial.arrivals), key=lambda pair: (pair[1].at_s, pair[0])))
        self._ended_at = 0.0
        self._is_renewing = False

    def outcome(self) -> Outcome:
        self._expect()
        stops_at = math.inf if self._trial.stops_at_s is None else self._trial.stops_at_s
        while self._events and self._events[0][0] <= stops_at:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        assert self._events or not self._num_open, "a request has neither ended nor been refused"
        if self._events:
            self._now = self._ended_at = stops_at
        self._stop()
        workers = [seat.worker for line in self._lines.values() for seat in line.seats]
        began_at = min(arrival.at_s for arrival in self._trial.arrivals)
        duration_s = max(0.0, self._ended_at - began_at)
        return Outcome(
            total=self._tallies.total.part(),
            classes=self._tallies.classes(line.gaps.of_class for line in self._lines.values()),
            tenants={tenant: tally.part() for tenant, tally in sorted(self._tallies.of_tenant.items())},
            duration_s=duration_s,
            utilisation=sum(worker.busy_s for worker in workers) / (len(workers) * duration_s) if duration_s else 0.0,
            num_preemptions=sum(worker.num_preemptions for worker in workers),
            num_tail_frees=sum(worker.num_tail_frees for worker in workers),
            num_displacements=sum(worker.num_displacements for worker in workers),
        )

    def _stop(self) -> None:
        """What has been written until then counts; what still waits has waited until then."""
        for line in self._lines.values():
            self._catch_up(line)
            line.gaps.stop()
            for lane in line.lanes:
                for turn in lane.waiting:
                    self._waited(turn.item, self._now)

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, happen))

    # The way of a request

    def _expect(self) -> None:
        """The next arrival."""
        found = next(self._arrivals, None)
        if found is not None:
            number, arrival = found
            self._at(arrival.at_s, lambda: self._arrive(number, arrival))

    def _policy_of(self, arrival: Arrival) -> Policy:
        """The tenant's, narrowed by the key."""
        policy, key = self._trial.policies[arrival.tenant], self._trial.keys.get(arrival.key)
        if key is None:
            return policy
        names = arrival.tenant, arrival.key
        if names not in self._narrowed:
            self._narrowed[names] = narrowed(policy, key.narrowing)
        return self._narrowed[names]

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._expect()
        self._ended_at = max(self._ended_at, self._now)
        trial, policy = self._trial, self._policy_of(arrival)
        sla_class = class_for(policy, trial.classes, arrival.service_tier)
        for tally in self._tallies.of(arrival.tenant, sla_class):
            tally.num_requests += 1
        line = self._lines.get(arrival.model)
        if line is None or not policy.may_use(arrival.model):
            return self._refuse(arrival, sla_class, "model_not_found")
        if not line.fits(arrival):
            return self._refuse(arrival, sla_class, "context_length_exceeded")
        self._catch_up(line)
        most = arrival.max_completion_tokens or arrival.num_completion_tokens
        names = (arrival.tenant, arrival.key, arrival.model, sla_class)
        purse_id = key.purse_id if (key := trial.keys.get(arrival.key)) is not None else ""
        ticket = self._meter.admit(policy, names, purse_id, f"req{number}", arrival.num_prompt_tokens, most, self._now)
        if isinstance(ticket, str):
            return self._refuse(arrival, sla_class, ticket)
        order = Order(
            tenant_id=arrival.tenant,
            sla_class=sla_class,
            weight=policy.weight,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_expected_tokens=min(most, trial.completion_estimate),
            deadline_at=self._now + trial.classes[sla_class].ttft_ms / 1e3,
        )
        seat = line.free_seat(order)
        predicted_s = line.predicted_ttft_s(order, seat, self._now)
        refusal = line.refusal(order, seat, predicted_s)
        if refusal is not None:
            self._meter.close(ticket, None, self._now)
            return self._refuse(arrival, sla_class, refusal)
        job = Job(arrival, self._now, order, ticket)
        job.predicted_ttft_s = predicted_s
        line.streams[sla_class].came(order, self._now)
        self._num_open += 1
        if not self._is_renewing:
            self._is_renewing = True
            self._at(self._now + RENEW_S, self._renew)
        if seat is not None:
            line.send(seat, job, trial.classes[sla_class].priority, self._now)
            self._sent(line, seat, job)
            return None
        if (aside := line.aside_for(order)) is not None:
            self._give_up(line, aside, "queue_full")
        line.add(job)
        self._advance(line)
        if job.seat is None:
            up_at = self._now + trial.classes[sla_class].max_wait_s
            self._at(up_at, lambda: self._give_up(line, job, "queue_timeout"))
        return None

    def _refuse(self, arrival: Arrival, sla_class: str, reason: Reason) -> None:
        for tally in self._tallies.of(arrival.tenant, sla_class):
            tally.refuse(reason)

    def _give_up(self, line: Line, job: Job, reason: Reason) -> None:
        """It has waited as long as its class does, or leaves its place to another one."""
        if job.seat is not None or job.turn is None:
            return
        self._catch_up(line)
        line.remove(job.turn)
        job.turn = None
        self._meter.close(job.ticket, None, self._now)
        self._num_open -= 1
        self._refuse(job.arrival, job.order.sla_class, reason)
        self._waited(job, self._now)
        self._advance(line)

    def _advance(self, line: Line) -> None:
        while (sent := line.send_next(self._now)) is not None:
            self._sent(line, *sent)

    def _sent(self, line: Line, seat: Seat, job: Job) -> None:
        self._waited(job, self._now)
        self._serve(line, job, job.order.num_prompt_tokens)
        if seat.worker.stretch is not None:
            self._expect_end(line, seat)
        elif not seat.is_called:
            seat.is_called = True
            self._at(self._now, lambda: self._begin(line, seat))

    def _waited(self, job: Job, until: float) -> None:
        for tally in self._tallies.of(job.arrival.tenant, job.order.sla_class):
            tally.longest_wait_s = max(tally.longest_wait_s, until - job.at)

    # The way of a worker

    def _begin(self, line: Line, seat: Seat) -> None:
        seat.is_called = False
        if seat.worker.stretch is None and seat.worker.begin(self._now) is not None:
            self._num_steps += 1
            if self._num_steps > MAX_STEPS:
                raise TooMuch(f"More than {MAX_STEPS:,} steps of the workers; ask about fewer or shorter arrivals.")
            self._expect_end(line, seat)

    def _expect_end(self, line: Line, seat: Seat) -> None:
        """Of the stretch that it computes, as long as that is now; an earlier expectation finds another stretch."""
        stretch = seat.worker.stretch
        assert stretch is not None

        def end() -> None:
            if seat.worker.stretch is stretch:
                self._end(line, seat)

        self._at(stretch.end, end)

    def _end(self, line: Line, seat: Seat) -> None:
        self._catch_up(line)
        wrote = seat.worker.finish()
        self._wrote(line, seat, wrote)
        for sequence, _ in wrote:
            job = sequence.item
            assert isinstance(job, Job)
            if not sequence.is_done and not self._meter.top_up(job.ticket, job.num_written + 1, self._now):
                seat.worker.leave(sequence)
                job.was_cut = True
            if sequence.is_done:
                self._finish(line, seat, job, sequence)
        if any(sequence.is_done for sequence, _ in wrote):
            self._advance(line)
        self._begin(line, seat)

    def _catch_up(self, line: Line) -> None:
        """What was written until now counts until now: whose turn it is next depends on it."""
        for seat in line.seats:
            self._wrote(line, seat, seat.worker.progress(self._now))

    def _wrote(self, line: Line, seat: Seat, wrote: list[tuple[Simulated, int]]) -> None:
        for sequence, num_tokens in wrote:
            job = sequence.item
            assert isinstance(job, Job)
            if not job.num_written:
                seat.began(job)
            job.num_written += num_tokens
            seat.wrote(num_tokens)
            self._serve(line, job, num_tokens)
            line.lanes[job.order.sla_class].serve(job.order.tenant_id, job.order.weight, num_tokens)

    def _finish(self, line: Line, seat: Seat, job: Job, sequence: Simulated) -> None:
        assert sequence.first_token_at is not None
        seat.left(job)
        line.done(job)
        arrival, num_written = job.arrival, job.num_written
        usage = Usage(arrival.num_prompt_tokens, sequence.num_cached, num_written)
        cost = self._meter.close(job.ticket, usage, self._now, round(1e6 * sequence.engine_s))
        self._num_open -= 1
        self._ended_at = self._now
        terms = self._trial.classes[job.order.sla_class]
        ttft_ms = 1e3 * (sequence.first_token_at - job.at)
        tpot_ms = 1e3 * (self._now - sequence.first_token_at) / max(1, num_written - 1)
        for tally in self._tallies.of(arrival.tenant, job.order.sla_class):
            tally.num_prompt_tokens += usage.num_prompt_tokens
            tally.num_cached_tokens += usage.num_cached_tokens
            tally.num_completion_tokens += num_written
            tally.engine_s += sequence.engine_s
            tally.cost_micros += cost
            tally.num_cut += job.was_cut
            tally.ttfts_ms.append(ttft_ms)
            tally.errors_ms.append(1e3 * (job.predicted_ttft_s + job.at - sequence.first_token_at))
            if num_written > 1:
                tally.tpots_ms.append(tpot_ms)
            tally.num_kept += ttft_ms <= terms.ttft_ms and tpot_ms <= terms.tpot_ms

    # Both

    def _allowance(self, sequence: Simulated) -> int:
        job = sequence.item
        assert isinstance(job, Job)
        return job.ticket.covered - job.num_written

    def _serve(self, line: Line, job: Job, num_tokens: int) -> None:
        waiting = [lane.name for lane in line.lanes if len(lane)]
        self._tallies.serve(job.arrival.tenant, job.order.sla_class, num_tokens, waiting)

    def _renew(self) -> None:
        self._is_renewing = self._num_open > 0
        if self._is_renewing:
            self._meter.renew(self._now)
            self._at(self._now + RENEW_S, self._renew)
