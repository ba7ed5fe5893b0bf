"""One request's way through the house, as it is noted while it goes.

All that is kept of it are instants, in monotonic seconds: each is when a part of the way began, and the part before
ended then. So the parts lie end to end, and are together all the time from the request's first byte to the last of its
answer. They are noted of every request, since to ask whether somebody wants them takes as long; spans are made of them
only where the request turns out to be worth it, and somewhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.ledger.entry import Entry
    from gateway.reply import Answer
    from gateway.tracing.keeping import Keeping


class Journey:
    """An instant that is 0 has not come, or the request did not go that way. What most requests never come to is only
    here, in the class: that makes the beginning of all of them cheaper."""

    received_at = 0.0
    """When its first bytes were read from the socket; 0: no traces are made here."""
    started_at = parse_at = render_at = cache_at = admit_at = 0.0
    load_at = 0.0
    """Its model had to be loaded first."""
    queue_at = 0.0
    """It was handed to the line, or to whoever has the answer already."""
    settle_at = 0.0
    replay_at = 0.0
    """From here it was told what another request under its Idempotency-Key is answered."""
    error = ""
    """What the failure is called."""
    follows = ""
    """W3C trace context of the request whose answer it reads along with; empty: it has none of another's."""
    entry: Entry | None = None
    """Its ledger row."""

    # Where traces are made

    traceparent = ""
    """Of its own span, or UNDECIDED; empty: no traces are made here."""
    parent_id = ""
    """Of whoever asked; empty: the trace begins here."""
    state = baggage = ""
    kept_for = ""
    """Why it has a trace: it was chosen at its beginning, or for what became of it; empty: it has none so far."""
    keeping: Keeping | None = None
    """By whose rules it may still come to have one; None: that is decided, or no traces are made here."""
    answer: Answer | None = None
    """What it is answered, until that is told."""
    shows_content = False
    kind = "request"
    """As ``Kept`` has it."""
    batch = ""
