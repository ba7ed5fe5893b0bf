"""How long a request was with each worker or upstream that had it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from gateway.flight import Flight

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


def stays_of(flight: Flight) -> list[Stay]:
    """All of them so far. Most requests have no trace and one stay, so it is noted only of those that were chosen at
    their beginning; of others it is known from when to when it was, and not how long it took to write it down."""
    stays, worker, at = flight.stays or [], flight.given_to, flight.given_at
    if not stays and worker is not None:
        stays = [Stay(worker.name, at, at, 0)]
    if stays and not stays[-1].left_at:
        stays[-1].left_at = flight.left_at
    return stays
