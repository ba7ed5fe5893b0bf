"""Whole rows, posted one by one and signed the Standard Webhooks way, as the alerts are (``gateway.webhooks``)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from gateway.sinks.events import Event
from gateway.webhooks import signature

TYPE = "usage.settled"
LEFT_OUT = ("link", "metadata", "cost_micros")


class Webhook:
    """A Kind of receiver: whole rows of the ledger, signed."""

    max_events = 1

    def __init__(self, secret: bytes, currency: str) -> None:
        self._secret = secret
        self._currency = currency

    def lane(self, event: Event) -> str:
        return ""

    def written(self, events: Sequence[Event], at: int) -> tuple[bytes, dict[str, str]]:
        (event,) = events
        entry = event.entry
        row = {name: value for name, value in msgspec.structs.asdict(entry).items() if name not in LEFT_OUT}
        settled_at = datetime.fromtimestamp(entry.settled_at, UTC).isoformat().replace("+00:00", "Z")
        data = row | {
            "customer": event.customer,
            "cost": {"amount_micros": entry.cost_micros, "currency": self._currency},
            "metadata": msgspec.Raw(entry.metadata.encode()) if entry.metadata is not None else None,
        }
        payload = msgspec.json.encode({"type": TYPE, "timestamp": settled_at, "data": data})
        return payload, {
            "content-type": "application/json",
            "webhook-id": event.id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(self._secret, event.id, at, payload),
        }

    def judged(self, status: int, body: bytes, events: Sequence[Event]) -> dict[str, str | None]:
        return {}

    def unfit(self, event: Event, now: float) -> str | None:
        return None
