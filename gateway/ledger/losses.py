"""Rows that will never come, since the spool that kept them is lost with its machine: places that are given up.

Whoever follows the ledger waits at a place without a row, and nothing behind it is counted, billed or closed. A place
that is given up is passed; that its row is missing stays a finding whenever the ledger is verified.
"""

from __future__ import annotations

import time

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.store import Store, new_id

MAX_PLACES = 100_000
"""Given up at once."""


class Refused(Exception):
    """The places cannot be given up; the message says why."""


class Loss(msgspec.Struct, frozen=True):
    """For the audit log."""

    chain: int
    first_position: int
    last_position: int
    reason: str


async def give_up(rooms: Store, loss: Loss) -> None:
    """Raises Refused, and what the database raises; then nothing has changed."""
    first, last = loss.first_position, loss.last_position
    if not 1 <= first <= last or last - first >= MAX_PLACES:
        raise Refused(f"positions {first} to {last} are no places, or more than {MAX_PLACES:,}")
    rows, places = store.ledger.c, store.ledger_repeats.c
    async with rooms.changing() as (connection, _):
        there = sa.union_all(
            sa.select(rows.position).where(rows.chain == loss.chain, rows.position.between(first, last)),
            sa.select(places.position).where(places.chain == loss.chain, places.position.between(first, last)),
        )
        if (found := (await connection.execute(there.limit(1))).scalar()) is not None:
            raise Refused(f"position {found} of chain {loss.chain} is not missing")
        behind = sa.select(rows.position).where(rows.chain == loss.chain, rows.position > last).limit(1)
        if (await connection.execute(behind)).first() is None:
            raise Refused(f"chain {loss.chain} has no row behind position {last}: nothing waits for those before it")
        given_up = {"chain": loss.chain, "request_id": "", "content": b""}
        missing = [{**given_up, "position": position} for position in range(first, last + 1)]
        await connection.execute(sa.insert(store.ledger_repeats), missing)
        line = {
            "id": new_id("aud"),
            "at": int(time.time()),
            "actor_key_id": "",
            "actor_name": "penstock ledger give-up",
            "action": "ledger.given_up",
            "object_kind": "ledger_chain",
            "object_id": str(loss.chain),
            "before": None,
            "after": msgspec.json.encode(loss).decode(),
            "request_id": "",
            "address": "",
        }
        await connection.execute(sa.insert(store.audit_log), line)
