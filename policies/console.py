"""The settings of the web console."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policies.section import Section


class Console(Section, frozen=True):
    """The pages at /console."""

    enabled: bool = True
    """false: neither pages nor sign-in."""
    session_hours: Annotated[float, Meta(gt=0, le=720)] = 12.0
    """So long whoever signed in stays so, unless the key ends before."""
    recent_requests: Annotated[int, Meta(ge=0, le=100_000)] = 500
    """The last that have ended, of which each gateway process can tell part by part where their time went, at less than
    1 KiB each; of all others it is what the ledger says. As many again of those that went into a trace."""
