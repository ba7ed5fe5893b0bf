"""The next request to a worker, its deltas back to its stream.

In front of each model stands one bounded line. A worker is given no more than fills its batch and a little; the rest
waits here, in order, and goes to whichever worker has room first (late binding).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway import errors
from gateway.clock import Clock, Timer
from gateway.flight import Flight
from gateway.workers import COMMAND, Worker, child_of, socket_directory
from policies import settings, wire

if TYPE_CHECKING:
    from gateway.text import Text

__all__ = ["Dispatch", "Flight", "NothingToServe", "ServedModel"]

OVERCOMMIT = 16
"""A worker holds one sequence in this many beyond its batch: a place that falls free is taken in the next step."""


class NothingToServe(Exception):
    """No model can be loaded, and each has said why on standard error."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it."""

    name: str
    created: int
    """Unix seconds: when this gateway began to serve it."""
    ready: bool


class Seat:
    """A worker and the flights it holds."""

    __slots__ = ("flights", "num_sequences", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.flights: dict[str, Flight] = {}
        self.num_sequences = 0
        """Open sequences of its flights."""

    def has_room(self, num_sequences: int) -> bool:
        """More sequences than ever fit go to a worker that has nothing else to do: it takes them in turns."""
        facts = self.worker.facts
        if facts is None:
            return False
        ceiling = facts.max_sequences + max(1, facts.max_sequences // OVERCOMMIT)
        return self.num_sequences == 0 or self.num_sequences + num_sequences <= ceiling


class Line:
    """One model: its workers, what they compute, and who waits for them. Hears of the workers as their ``Host``."""

    def __init__(self, name: str, queue: settings.Queue, clock: Clock, changed: Callable[[], None]) -> None:
        """``changed`` is called when a worker joins or is given up."""
        self.name = name
        self.seats: dict[Worker, Seat] = {}
        self.waiting: deque[Flight] = deque()
        self._queue = queue
        self._clock = clock
        self._changed = changed
        self._timer: Timer | None = None

    def ready(self) -> wire.Ready | None:
        """The facts of a ready worker."""
        for worker in self.seats:
            if worker.facts is not None:
                return worker.facts
        return None

    def submit(self, request: wire.Submit) -> Flight:
        """Raises QueueFull."""
        flight = Flight(self, request, self._clock.now())
        seat = None if self.waiting else self._seat_for(flight)
        if seat is not None:
            self._send(seat, flight)
        elif len(self.waiting) < self._queue.max_waiting:
            self.waiting.append(flight)
            self._watch_head()
        else:
            raise errors.QueueFull(
                f"{len(self.waiting)} requests wait for the model '{self.name}' already. Please try again.",
                retry_after_s=1.0,
            )
        return flight

    def abandon(self, flight: Flight) -> None:
        """Nobody reads this flight any more."""
        if flight.finished:
            return
        if flight.worker is not None:
            flight.worker.send(wire.Cancel(flight.request.request_id))
        else:
            self.waiting.remove(flight)
            flight.fail(errors.RequestFailed("The request was cancelled."))
            self._advance()

    def cut(self, error: errors.GatewayError) -> None:
        """Every flight ends here."""
        for seat in self.seats.values():
            for flight in list(seat.flights.values()):
                self.abandon(flight)
                flight.fail(error)
        while self.waiting:
            self.waiting.popleft().fail(error)

    @property
    def num_flights(self) -> int:
        return len(self.waiting) + sum(len(seat.flights) for seat in self.seats.values())

    # Host of the workers

    def joined(self, worker: Worker) -> None:
        self._advance()
        self._changed()

    def moved(self, worker: Worker, deltas: Sequence[wire.Delta]) -> None:
        seat = self.seats[worker]
        flights = seat.flights
        now = self._clock.now()
        num_finished = 0
        for delta in deltas:
            flight = flights.get(delta.request_id)
            if flight is None:
                raise wire.WireError(f"a delta for {delta.request_id}, which it does not hold")
            if flight.arrive(delta, now):
                num_finished += 1
                if not flight.num_open:
                    flight.worker = None
                    del flights[delta.request_id]
        if num_finished:
            seat.num_sequences -= num_finished
            self._advance()

    def refused(self, worker: Worker, failed: wire.Failed) -> None:
        seat = self.seats[worker]
        flight = seat.flights.pop(failed.request_id, None)
        if flight is None:
            raise wire.WireError(f"a failure of {failed.request_id}, which it does not hold")
        seat.num_sequences -= flight.num_open
        flight.fail(errors.RequestFailed.of(failed))
        self._advance()

    def left(self, worker: Worker) -> None:
        seat = self.seats[worker]
        flights, seat.flights, seat.num_sequences = seat.flights, {}, 0
        for flight in flights.values():
            flight.fail(
                errors.WorkerLost("The worker that computed this answer was lost. Please try again.", retry_after_s=1.0)
            )

    def gave_up(self, worker: Worker) -> None:
        del self.seats[worker]
        if not self.seats:
            while self.waiting:
                self.waiting.popleft().fail(errors.ModelUnavailable(f"The model '{self.name}' cannot be loaded."))
        self._changed()

    # The line

    def _seat_for(self, flight: Flight) -> Seat | None:
        """The ready worker with the fewest open sequences, if it has room."""
        freest: Seat | None = None
        for seat in self.seats.values():
            if seat.has_room(flight.num_sequences) and (freest is None or seat.num_sequences < freest.num_sequences):
                freest = seat
        return freest

    def _advance(self) -> None:
        """Sends from the head of the line while there is room; a wide request at the head waits for it: order holds."""
        while self.waiting:
            seat = self._seat_for(self.waiting[0])
            if seat is None:
                return
            self._send(seat, self.waiting.popleft())

    def _send(self, seat: Seat, flight: Flight) -> None:
        seat.flights[flight.request.request_id] = flight
        seat.num_sequences += flight.num_sequences
        flight.worker = seat.worker
        flight.sent_at = self._clock.now()
        seat.worker.send(flight.request)

    def _watch_head(self) -> None:
        """All wait equally long at most, so the head's time is up first."""
        if self._timer is None and self.waiting:
            wait_s = self.waiting[0].submitted_at + self._queue.max_wait_s - self._clock.now()
            self._timer = self._clock.call_later(max(0.0, wait_s), self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        overdue_at = self._clock.now() - self._queue.max_wait_s
        while self.waiting and self.waiting[0].submitted_at <= overdue_at:
            self.waiting.popleft().fail(
                errors.QueueTimeout(
                    f"No worker had room for the request within {self._queue.max_wait_s:g} s.", retry_after_s=1.0
                )
            )
        self._advance()
        self._watch_head()


class Dispatch:
    """All models that are served here, by name."""

    def __init__(self, config: settings.Settings, clock: Clock, command: Sequence[str] = COMMAND) -> None:
        """``command`` starts a worker process; its settings follow as JSON."""
        self.draining = False
        """New requests are refused; running ones finish."""
        self._config = config
        self._clock = clock
        self._command = command
        self._created = int(time.time())
        self._lines = {name: Line(name, config.queue, clock, self._look_around) for name in config.models}
        self._texts: dict[str, Text] = {}
        self._workers: list[Worker] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._first: asyncio.Future[None] | None = None

    def serve(self, name: str, text: Text) -> None:
        """Starts, or connects to, the workers of a model of the settings."""
        model = self._config.models[name]
        self._texts[name] = text
        for index in range(model.replicas):
            if self._sockets is None:
                self._sockets = socket_directory()
            address = f"unix:{self._sockets.name}/{len(self._workers)}"
            child = child_of(name, model, index, address)
            self._seat(name, child.name, address, child)
        for address in model.addresses:
            self._seat(name, f"{name}@{address}", address, None)

    def give_up(self, name: str) -> None:
        """This model cannot be served at all; why is already on standard error."""
        del self._lines[name]
        self._look_around()

    async def until_ready(self) -> None:
        """Until the first model can answer. Raises NothingToServe when none ever will."""
        self._first = asyncio.get_running_loop().create_future()
        self._look_around()
        await self._first

    async def close(self, drain_s: float) -> None:
        """Ends all workers, letting them finish what they still hold for ``drain_s``."""
        await asyncio.gather(*(worker.close(drain_s) for worker in self._workers))
        if self._sockets is not None:
            self._sockets.cleanup()

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(name, self._created, name in self._texts and line.ready() is not None)
            for name, line in self._lines.items()
        ]

    def text(self, model: str) -> Text:
        """Raises ModelNotFound, and ModelUnavailable while its files are being read."""
        self._line(model)
        text = self._texts.get(model)
        if text is None:
            raise _unavailable(model)
        return text

    def ready(self, model: str) -> wire.Ready:
        """The facts of one of its ready workers. Raises ModelNotFound, ModelUnavailable."""
        facts = self._line(model).ready()
        if facts is None:
            raise _unavailable(model)
        return facts

    def submit(self, model: str, submit: wire.Submit) -> Flight:
        """Sends it to a worker or lets it wait in line. Raises ModelNotFound, QueueFull, Draining."""
        if self.draining:
            raise errors.Draining("This server is shutting down.", retry_after_s=1.0)
        return self._line(model).submit(submit)

    def workers(self) -> Sequence[Worker]:
        """Every place for a worker, also those that are empty at the moment."""
        return self._workers

    def num_waiting(self) -> int:
        """Requests in all lines."""
        return sum(len(line.waiting) for line in self._lines.values())

    def cut(self) -> None:
        """Ends every flight with Draining."""
        for line in self._lines.values():
            line.cut(errors.Draining("This server is shutting down."))

    def _line(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            raise errors.ModelNotFound(
                f"The model `{model}` does not exist or you do not have access to it.", param="model"
            )
        return line

    def _seat(self, model: str, name: str, address: str, child: settings.WorkerSettings | None) -> None:
        line = self._lines[model]
        worker = Worker(name, address, line, self._config.workers, self._clock, child, self._command)
        line.seats[worker] = Seat(worker)
        self._workers.append(worker)
        worker.start()

    def _look_around(self) -> None:
        """Something changed: can anybody answer now, or will nobody ever?"""
        for name, line in list(self._lines.items()):
            if name in self._texts and not line.seats:
                del self._lines[name]
        if self._first is None or self._first.done():
            return
        if any(model.ready for model in self.models()):
            self._first.set_result(None)
        elif not self._lines:
            self._first.set_exception(NothingToServe())


def _unavailable(model: str) -> errors.ModelUnavailable:
    return errors.ModelUnavailable(
        f"The model '{model}' cannot answer at the moment. Please try again.", retry_after_s=1.0
    )
