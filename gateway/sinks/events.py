"""A row of the ledger as the events that a receiver counts, each with an id that follows from the row: whoever gets one
twice can tell."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from gateway.ledger.entry import Entry
from policies.sinks import Measure, Sink, amounts
from policies.terms import Usage

MAX_ID_CHARS = 100
"""What Stripe takes; ids are far shorter."""


class Event(NamedTuple):
    """One thing that a receiver is told."""

    id: str
    customer: str
    """Whose it is, in the receiver's words."""
    name: str
    """Of the meter."""
    measure: Measure | Literal["row"]
    value: int
    """Negative where a correction takes something back."""
    entry: Entry


class Kind(Protocol):
    """How one kind of receiver is spoken to."""

    max_events: int
    """In one post."""

    def lane(self, event: Event) -> str:
        """Events of one lane are posted one after the other, those of others meanwhile."""

    def written(self, events: Sequence[Event], at: int) -> tuple[bytes, dict[str, str]]:
        """The body of a post and its headers; ``at``: now, in Unix seconds."""

    def judged(self, status: int, body: bytes, events: Sequence[Event]) -> dict[str, str | None]:
        """What an answer that is no success says of single events, by their ids: why one is refused, or None when it
        has been there before. Empty: nothing."""

    def unfit(self, event: Event, now: float) -> str | None:
        """Why it would be refused in any case; None: nothing is known against it."""


def events_of(entry: Entry, customer: str, sink: Sink) -> list[Event]:
    """All that the row has to say: to those who count, what is owed."""
    if sink.kind == "webhook":
        return [Event(id_of(entry, "row"), customer, "", "row", 0, entry)]
    if not entry.is_owed:
        return []
    usage = Usage(
        entry.num_prompt_tokens, entry.num_cached_tokens, entry.num_completion_tokens, entry.num_reasoning_tokens
    )
    num_requests = 0 if entry.corrects is not None else 1
    found = amounts(usage, entry.cache, entry.engine_us, num_requests, entry.cost_micros)
    return [
        Event(id_of(entry, measure), customer, name, measure, found[measure], entry)
        for measure, name in sink.meters.items()
        if measure in found
    ]


def id_of(entry: Entry, measure: str) -> str:
    """The same whenever, and by whomever, it is sent."""
    event_id = f"{entry.request_id}:{measure}"
    return event_id if len(event_id) <= MAX_ID_CHARS else hashlib.sha256(event_id.encode()).hexdigest()


def details_of(event: Event) -> dict[str, Any]:
    """What an event says beside whose and how much it is, for meters that tell models or requests apart."""
    entry = event.entry
    told: dict[str, Any] = {
        "value": event.value,
        "measure": event.measure,
        "model": entry.model,
        "request_id": entry.request_id,
        "tenant_id": entry.tenant_id,
        "key_id": entry.key_id,
        "endpoint": entry.endpoint,
        "service_tier": entry.service_tier,
    }
    if entry.corrects is not None:
        told |= {"corrects": entry.corrects, "reason": entry.reason or ""}
    return told
