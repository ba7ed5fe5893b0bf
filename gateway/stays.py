"""How long a request was with each worker or upstream that had it."""

from __future__ import annotations

from typing import Literal

import msgspec

Left = Literal["", "lost", "moved", "failed"]


class Stay(msgspec.Struct, array_like=True, gc=False):
    """With one of them. Instants are monotonic seconds."""

    worker: str
    """Or the upstream."""
    routed_at: float
    """It was its turn, and a worker was chosen."""
    sent_at: float
    """Given to the socket; the time before it is that of choosing and of writing it down."""
    num_tokens: int
    """That it came with, of its completions."""
    left_at: float = 0.0
    """0: not yet."""
    left: Left = ""
    """Lost: the worker was; moved: another one goes on with it; failed: the upstream has. Empty: it ended there."""
    span_id: str = ""
    """Of its own span, as the upstream was told, in hex; empty: it is a worker."""
    failure: str = ""
    """What an upstream's is called."""
