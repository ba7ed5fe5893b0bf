"""A flight that is over, as a trace tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.flight import Flight
from gateway.stays import stays_of
from gateway.tracing.kept import Ride
from policies import wire

if TYPE_CHECKING:
    from gateway.reply import Answer

MAX_TOLD = 16
"""Sequences of one prompt of which it is told what the worker said."""
MAX_RIDES = 16
"""Prompts of one request that are told of, one by one."""


def rides_of(answer: Answer) -> tuple[int, list[Ride]]:
    """How many prompts were sent for this answer, and the rides of the first of them."""
    num_flights, rides = 0, list[Ride]()
    for part in answer.parts.values():
        if (flight := part.flight) is not None:
            num_flights += 1
            if num_flights <= MAX_RIDES:
                rides.append(ride_of(flight))
    return num_flights, rides


def ride_of(flight: Flight) -> Ride:
    """Also of one that nobody waits for any more."""
    request = flight.request
    return Ride(
        flight.submitted_at,
        flight.first_token_at,
        len(request.prompt_token_ids),
        flight.num_tokens,
        request.grammar is not None,
        stays_of(flight),
        [each for each in flight.meter.told_last if isinstance(each, wire.Finish)][:MAX_TOLD],
    )
