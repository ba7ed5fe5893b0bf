"""The workers of one model together: what is known of them, how fast they are, and which of them a request goes to."""

from __future__ import annotations

from collections.abc import Callable

from gateway.flight import Flight
from gateway.seat import Seat
from gateway.workers import Worker
from policies import wire
from policies.promise import Pace
from policies.routing import choose


class Seats(dict[Worker, Seat]):
    """Each worker's, from its first start until it is given up."""

    @property
    def facts(self) -> wire.Ready | None:
        """Those of a ready worker."""
        for worker in self:
            if worker.facts is not None:
                return worker.facts
        return None

    def speed(self) -> tuple[Pace | None, float]:
        """The pace of a worker, and how many take requests, each as far as it works for us; 1 while there are none."""
        seat = self._known()
        parts = [seat.part for seat in self.values() if seat.takes_requests and seat.worker.facts]
        return None if seat is None else seat.pace, sum(parts) or 1.0

    def soonest_s(self, num_prompt_tokens: int) -> float:
        """Until the first token of such a prompt, with the worker that has the fewest to compute; 0: nothing is
        known."""
        seat = self._known()
        return 0.0 if seat is None else seat.prefill_s(num_prompt_tokens)

    def admit(self, flight: Flight) -> bool:
        """Some worker does, now or once it has room."""
        return any(seat.admits(flight) for seat in self.values())

    def best(self, flight: Flight, priority: int, refuses: Callable[[Worker, str], bool]) -> Seat | None:
        """Of the workers that have room, the one where its first token should come soonest. ``refuses``: whether a
        worker cannot use this adapter; where all of them refuse, one has to say so."""
        able = [seat for seat in self.values() if seat.has_room(flight, priority)]
        if adapter := flight.request.adapter:
            able = [seat for seat in able if not refuses(seat.worker, adapter)] or able
        if len(able) < 2:
            return able[0] if able else None
        num_prompt_tokens = flight.order.num_prompt_tokens
        return able[choose(num_prompt_tokens, [seat.candidate(flight) for seat in able])]

    def release(self, flight: Flight) -> None:
        """What is reserved for it anywhere."""
        for seat in self.values():
            seat.release(flight)

    @property
    def has_leaving(self) -> bool:
        """A worker takes nothing more, and may have flights that could go on elsewhere."""
        return any(not seat.takes_requests for seat in self.values())

    def leaving(self) -> list[Flight]:
        """Those that such workers have and could let go. One that is suspect stays: it is soon above suspicion, or has
        ended its worker."""
        return [
            flight
            for seat in self.values()
            if not seat.takes_requests
            for flight in seat.flights.values()
            if flight.is_wanted and not flight.is_moving and flight not in seat.suspects
        ]

    def flights(self) -> list[Flight]:
        """All that a worker has."""
        return [flight for seat in self.values() for flight in seat.flights.values()]

    def _known(self) -> Seat | None:
        """That of the worker whose costs are known that has the fewest prompts to compute."""
        return min(
            (seat for seat in self.values() if seat.pace is not None),
            key=lambda seat: seat.num_pending_tokens,
            default=None,
        )
