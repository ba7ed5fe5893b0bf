"""What gateway processes and the process that owns their workers tell each other of models, as lines of JSON.

A gateway sends requests to a model only while it has a lease of it, and the owner ends no worker whose model is leased:
so nobody's request meets a worker that leaves, however the two messages cross. A lease ends by a ``Return``, or with
the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

import msgspec

from policies.residency import NoRoom

Stage = Literal["out", "in", "leaving"]
Verb = Literal["load", "unload", "pin", "unpin"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all of them: an object whose ``type`` is the class name."""


class Lease(Message, frozen=True):
    """Requests are about to go to this model: it is loaded if it has to be, and stays."""

    model: str
    number: int
    """Counts the gateway's leases, from 1."""


class Return(Message, frozen=True):
    """The lease of this model ends: none of the gateway's requests is with it."""

    model: str


class Change(Message, frozen=True):
    """An operator's; ``Changed`` answers."""

    number: int
    model: str
    verb: Verb


class Standing(Message, frozen=True):
    """How a model stands now. Instants are of the machine's monotonic clock."""

    model: str
    lease: int
    """Number of the lease that the gateway has; 0: none. Requests may go there while the model is in."""
    stage: Stage
    places: tuple[str, ...]
    """Addresses of its workers: of those started here, the ones that were ready since it was loaded."""
    is_wanted: bool
    is_first_start: bool
    is_hopeless: bool
    is_pinned: bool
    num_bytes: int
    budget_bytes: int | None
    """Of all models."""
    began_at: float
    load_s: float
    failed_at: float | None
    no_room: NoRoom | None


class Changed(Message, frozen=True):
    """What became of a ``Change``; the standings that it led to were told before."""

    number: int
    fault: Literal["", "not_ours", "in_use"]


ToOwner = Lease | Return | Change
ToGateway = Standing | Changed


class Owner(Protocol):
    """The way to who owns the workers."""

    given_up: Collection[str]
    """Models of the settings that are not served, which has been said."""

    def send(self, message: ToOwner) -> None: ...

    def follow(self, heard: Callable[[ToGateway], None]) -> None:
        """From now on it hears what is told, and at once what has been told."""
