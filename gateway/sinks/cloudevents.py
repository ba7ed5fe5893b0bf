"""CloudEvents 1.0 in batches of JSON, as OpenMeter takes them, which tells repetitions by source and id.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md (section 4, batches)
https://openmeter.io/docs/metering/events/overview
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from gateway.sinks.events import Event, details_of


class CloudEvents:
    """A Kind of receiver: batches of CloudEvents, as OpenMeter takes them."""

    max_events = 100

    def __init__(self, key: str, source: str) -> None:
        """``key``: empty where the receiver asks for none."""
        self._source = source
        self._headers = {"content-type": "application/cloudevents-batch+json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def lane(self, event: Event) -> str:
        return ""

    def written(self, events: Sequence[Event], at: int) -> tuple[bytes, dict[str, str]]:
        batch = [
            {
                "specversion": "1.0",
                "id": event.id,
                "source": self._source,
                "type": event.name,
                "subject": event.customer,
                "time": datetime.fromtimestamp(event.entry.settled_at, UTC).isoformat().replace("+00:00", "Z"),
                "datacontenttype": "application/json",
                "data": details_of(event),
            }
            for event in events
        ]
        return msgspec.json.encode(batch), self._headers

    def judged(self, status: int, body: bytes, events: Sequence[Event]) -> dict[str, str | None]:
        return {}

    def unfit(self, event: Event, now: float) -> str | None:
        return None
