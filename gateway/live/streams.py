"""The requests that have been open for longest: what an operator looks for when something takes its time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.flight import Flight
from gateway.upstreams.call import Call

MAX_STREAMS = 50
"""Of which a snapshot tells."""


class StreamLive(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has not ended."""

    request_id: str
    tenant_id: str
    model: str
    sla_class: str
    worker: str | None
    """Null while none has it, and where an upstream is asked."""
    state: Literal["waiting", "prefill", "decode", "returning"]
    """Returning: it lost its worker, and waits for another one."""
    age_s: float
    """Since it was let in."""
    num_prompt_tokens: int
    num_completion_tokens: int
    """So far, of all its sequences."""
    upstream: str | None = None
    """The one that is asked."""


def oldest(flights: Iterable[tuple[str, Flight]], now: float) -> list[StreamLive]:
    """The ``MAX_STREAMS`` that have been open for longest, the oldest first; ``now`` is monotonic."""
    longest = heapq.nsmallest(MAX_STREAMS, flights, key=lambda each: each[1].submitted_at)
    return [_told(model, flight, now) for model, flight in longest]


def of_all(reports: Iterable[list[StreamLive]]) -> list[StreamLive]:
    """The oldest of those that several gateways tell of."""
    return heapq.nlargest(MAX_STREAMS, (each for report in reports for each in report), key=lambda each: each.age_s)


def _told(model: str, flight: Flight, now: float) -> StreamLive:
    upstream = flight.upstream if isinstance(flight, Call) else None
    if flight.worker is not None or upstream is not None:
        state: Literal["waiting", "prefill", "decode", "returning"]
        state = "prefill" if flight.first_token_at is None else "decode"
    else:
        state = "waiting" if flight.sent_at is None else "returning"
    return StreamLive(
        request_id=flight.request.request_id,
        tenant_id=flight.order.tenant_id,
        model=model,
        sla_class=flight.order.sla_class,
        worker=None if flight.worker is None else flight.worker.name,
        state=state,
        age_s=round(now - flight.submitted_at, 3),
        num_prompt_tokens=flight.order.num_prompt_tokens,
        num_completion_tokens=flight.num_tokens,
        upstream=upstream,
    )
