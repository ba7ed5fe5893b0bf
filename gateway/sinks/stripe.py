"""Meter events of Stripe, one a post.

Stripe knows an identifier again for a day at least, takes what is at most 35 days old, whole numbers of either sign,
and one post at a time for a customer and a meter. A period that comes out below zero counts as zero there.

https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.sinks.events import Event

URL = "https://api.stripe.com/v1/billing/meter_events"
MAX_AGE_S = 35 * 86_400
MARGIN_S = 60
REPEATED = "already exists with identifier"
"""How Stripe says that it has had an event before."""


class Stripe:
    """A Kind of receiver: Stripe's meters. See this file's head for what it takes and forgets."""

    max_events = 1

    def __init__(self, key: str) -> None:
        self._headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/x-www-form-urlencoded",
        }

    def lane(self, event: Event) -> str:
        return f"{event.customer}\0{event.name}"

    def written(self, events: Sequence[Event], at: int) -> tuple[bytes, dict[str, str]]:
        (event,) = events
        form = {
            "event_name": event.name,
            "identifier": event.id,
            "timestamp": str(event.entry.settled_at),
            "payload[stripe_customer_id]": event.customer,
            "payload[value]": str(event.value),
            "payload[model]": event.entry.model,
            "payload[measure]": event.measure,
        }
        return urllib.parse.urlencode(form).encode(), self._headers

    def judged(self, status: int, body: bytes, events: Sequence[Event]) -> dict[str, str | None]:
        (event,) = events
        try:
            error: Any = msgspec.json.decode(body)["error"]
            message, param = str(error.get("message", "")), str(error.get("param", ""))
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
            return {}
        if status in (400, 409) and REPEATED in message:
            return {event.id: None}
        if status == 404 and param.startswith("payload"):  # no such customer, rather than no such address
            return {event.id: f"status 404: {message}"}
        return {}

    def unfit(self, event: Event, now: float) -> str | None:
        if event.entry.settled_at < now - MAX_AGE_S + MARGIN_S:
            return "it is more than 35 days old, and Stripe takes none of those"
        return None
