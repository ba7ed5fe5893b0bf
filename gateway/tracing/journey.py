"""One request's way through the house, as it is noted while it goes.

All that is kept of it are instants, in monotonic seconds: each is when a part of the way began, and the part before
ended then. So the parts lie end to end, and are together all the time from the request's first byte to the last of its
answer. Spans are made of them only where the request turns out to be worth it, and somewhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.errors import GatewayError
    from gateway.flight import Flight
    from gateway.ledger.entry import Entry
    from gateway.reply import Answer


class Journey:
    """An instant that is 0 has not come, or the request did not go that way. What most requests never come to is only
    here, in the class: that makes the beginning of all of them cheaper."""

    parent_id = ""
    """Of whoever asked; empty: the trace begins here."""
    state = baggage = ""
    parse_at = render_at = cache_at = admit_at = 0.0
    load_at = 0.0
    """Its model had to be loaded first."""
    queue_at = 0.0
    """It was handed to the line, or to whoever has the answer already."""
    settle_at = 0.0
    replay_at = 0.0
    """From here it was told what another request under its Idempotency-Key is answered."""
    error = ""
    """What the failure is called."""
    flights: list[Flight] | None = None
    """One for each prompt; None: there are none."""
    follows = ""
    """W3C trace context of the request whose answer it reads along with; empty: it has none of another's."""
    entry: Entry | None = None
    """Its ledger row."""
    answer: Answer | None = None
    """What it is answered."""
    shows_content = False
    kind = "request"
    """As ``Kept`` has it."""
    batch = ""

    def __init__(self, traceparent: str, received_at: float, started_at: float, is_sampled: bool) -> None:
        self.traceparent = traceparent
        """Of its own span, for whoever it asks."""
        self.received_at = received_at
        """When its first bytes were read from the socket."""
        self.started_at = started_at
        """When its handler ran: whose key it is comes first."""
        self.is_sampled = is_sampled
        """By the ratio, or by whoever asked; else it is kept only for what becomes of it."""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        return self.traceparent[36:52]

    def outgoing(self) -> dict[str, str]:
        """Headers for whoever it asks by HTTP."""
        said = {"traceparent": self.traceparent, "tracestate": self.state, "baggage": self.baggage}
        return {name: value for name, value in said.items() if value}

    def failed(self, failure: GatewayError) -> None:
        """What its client hears. Not in what words: they may quote the request."""
        self.error = failure.code or failure.type
