"""Usage events of Lago, at most a hundred a post.

Lago takes all of a post or nothing, and answers with what is wrong with which; a transaction that it has had before is
one of those.

https://docs.getlago.com/api-reference/events/batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.sinks.events import Event, details_of

URL = "https://api.getlago.com/api/v1/events/batch"
REPEATED = {"transaction_id": ["value_already_exist"]}


class Refusal(msgspec.Struct):
    """What is wrong with which, by number."""

    error_details: dict[str, Any]


class Lago:
    """A Kind of receiver: Lago, a hundred events a post, of which it names those that it refuses."""

    max_events = 100

    def __init__(self, key: str) -> None:
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def lane(self, event: Event) -> str:
        return ""

    def written(self, events: Sequence[Event], at: int) -> tuple[bytes, dict[str, str]]:
        batch = [
            {
                "transaction_id": event.id,
                "external_subscription_id": event.customer,
                "code": event.name,
                "timestamp": event.entry.settled_at,
                "properties": details_of(event),
            }
            for event in events
        ]
        return msgspec.json.encode({"events": batch}), self._headers

    def judged(self, status: int, body: bytes, events: Sequence[Event]) -> dict[str, str | None]:
        if status != 422:
            return {}
        try:
            details = msgspec.json.decode(body, type=Refusal).error_details
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return {
            events[int(number)].id: None if wrong == REPEATED else f"status 422: {msgspec.json.encode(wrong).decode()}"
            for number, wrong in details.items()
            if number.isascii() and number.isdigit() and int(number) < len(events)
        }

    def unfit(self, event: Event, now: float) -> str | None:
        return None
