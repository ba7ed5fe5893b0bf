"""One request's way through the house, as it is noted while it goes.

All that is kept of it are instants, in monotonic seconds: each is when a part of the way began, and the part before
ended then. So the parts lie end to end, and are together all the time from the request's first byte to the last of its
answer. Spans are made of them only where the request turns out to be worth it, and somewhere else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gateway.errors import GatewayError
    from gateway.reply import Answer


class Journey(msgspec.Struct, gc=False):
    """An instant that is 0 has not come, or the request did not go that way. Nothing that it holds leads back to it, so
    the collector of cycles need not look at it."""

    trace_id: str
    span_id: str
    received_at: float
    """When its first bytes were read from the socket."""
    started_at: float
    """When its handler ran: whose key it is comes first."""
    is_sampled: bool = False
    """By the ratio, or by whoever asked; else it is kept only for what becomes of it."""
    parent_id: str = ""
    """Of whoever asked; empty: the trace begins here."""
    state: str = ""
    baggage: str = ""
    parse_at: float = 0.0
    load_at: float = 0.0
    """Its model had to be loaded first."""
    render_at: float = 0.0
    cache_at: float = 0.0
    admit_at: float = 0.0
    queue_at: float = 0.0
    """It was handed to the line, or to whoever has the answer already."""
    settle_at: float = 0.0
    replay_at: float = 0.0
    """From here it was told what another request under its Idempotency-Key is answered."""
    error: str = ""
    """What the failure is called."""
    flights: list[Any] | None = None
    """Its ``Flight``s, one for each prompt; None: there are none."""
    follows: str = ""
    """W3C trace context of the request whose answer it reads along with; empty: it has none of another's."""
    entry: Any = None
    """Its ledger row, an ``Entry``."""
    answer: Any = None
    """What it is answered, an ``Answer``."""
    shows_content: bool = False
    kind: str = "request"
    """As ``Kept`` has it."""
    batch: str = ""

    @property
    def traceparent(self) -> str:
        """For whoever it asks."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"

    def outgoing(self) -> dict[str, str]:
        """Headers for whoever it asks by HTTP."""
        said = {"traceparent": self.traceparent, "tracestate": self.state, "baggage": self.baggage}
        return {name: value for name, value in said.items() if value}

    def looks_in_cache(self, answer: Answer, shows_content: bool) -> None:
        """It is known what is asked."""
        self.cache_at = time.monotonic()
        self.answer, self.shows_content = answer, shows_content
        if shows_content:
            answer.remember()

    def failed(self, failure: GatewayError) -> None:
        """What its client hears. Not in what words: they may quote the request."""
        self.error = failure.code or failure.type
