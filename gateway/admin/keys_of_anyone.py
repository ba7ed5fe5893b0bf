"""What keys of tenants and of the administration have in common: their networks, their end, and their rotation."""

from __future__ import annotations

import ipaddress
from typing import Annotated, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import Versioned
from gateway.admin.problems import Conflict, Invalid
from gateway.admin.words import Written
from gateway.store import new_id

MAX_OVERLAP_S = 90 * 86_400

Networks = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...], Meta(max_length=64)]
"""CIDR blocks, such as 10.0.0.0/8."""


class KeyOfAnyone(Versioned, frozen=True, kw_only=True):
    """What is kept of any key; times in Unix seconds."""

    id: str
    name: str
    prefix: str
    last_four: str
    networks: tuple[str, ...]
    """Where its requests may come from; empty: anywhere."""
    rotated_from: str | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None


K = TypeVar("K", bound=KeyOfAnyone)


class Rotation(Written, frozen=True, kw_only=True):
    """How long the old key goes on beside the new one; 0: it ends at once."""

    overlap_s: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] = 86_400


async def successor(change: Change, before: K) -> K:
    """A key that may do what another may, not yet with a secret of its own, for as long as that would have been good.
    Raises Conflict where that has ended, or has a successor already."""
    if before.revoked_at is not None or (before.expires_at is not None and before.expires_at <= change.at):
        raise Conflict("Only a key that is still valid can be rotated; make a new one.")
    columns = store.keys.c
    others = sa.select(columns.id, columns.expires_at, columns.revoked_at).where(columns.rotated_from == before.id)
    last = (await change.connection.execute(others.order_by(columns.id.desc()).limit(1))).first()
    if last is not None and last.revoked_at is None:
        raise Conflict(f"This key has been rotated and ends soon: rotate its successor, {last.id}.")
    made = msgspec.structs.replace(before, id=new_id("key"), rotated_from=before.id, created_at=change.at, version=1)
    # Its own end is that of the overlap, where it has been rotated before.
    return made if last is None else msgspec.structs.replace(made, expires_at=last.expires_at)


def ending(before: K, overlap_s: int, now: int) -> K:
    """The key that was rotated: it ends after the overlap, or when it would have anyway."""
    ends_at = min(now + overlap_s, before.expires_at or now + overlap_s)
    return msgspec.structs.replace(before, expires_at=ends_at, version=before.version + 1)


def revoked(before: K, now: int) -> K:
    """The key from now on."""
    return msgspec.structs.replace(before, revoked_at=now, version=before.version + 1)


def networks_of(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The blocks as they are usually written. Raises Invalid."""
    blocks, wrong = [], []
    for number, text in enumerate(texts):
        try:
            blocks.append(str(ipaddress.ip_network(text)))
        except ValueError as error:
            wrong.append((f"networks[{number}]", f"is no block of addresses such as 10.0.0.0/8: {error}"))
    if wrong:
        raise Invalid.of(wrong)
    return tuple(blocks)


def check_ahead(expires_at: int | None, now: int) -> None:
    """Raises Invalid."""
    if expires_at is not None and expires_at <= now:
        raise Invalid.of([("expires_at", "is not in the future; revoke a key to end it now")])
