"""A flight that is over, as a trace tells it."""

from __future__ import annotations

from gateway.flight import Flight
from gateway.tracing.kept import Ride
from policies import wire

MAX_TOLD = 16
"""Sequences of one prompt of which it is told what the worker said."""


MAX_RIDES = 16
"""Prompts of one request that are told of, one by one."""


def rides_of(flights: list[Flight] | None) -> list[Ride]:
    """The first of them."""
    return [] if flights is None else [ride_of(flight) for flight in flights[:MAX_RIDES]]


def ride_of(flight: Flight) -> Ride:
    """Also of one that nobody waits for any more."""
    request = flight.request
    return Ride(
        flight.submitted_at,
        flight.first_token_at,
        len(request.prompt_token_ids),
        flight.num_tokens,
        request.grammar is not None,
        flight.stays or [],
        [each for each in flight.told[flight.num_told_before :] if isinstance(each, wire.Finish)][:MAX_TOLD],
    )
