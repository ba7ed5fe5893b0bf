"""Corrections: rows that add to earlier ones, for nothing in the ledger is ever changed.

They have a chain of their own, whichever gateway makes them, and are written in the transaction that says in the audit
log who made them and why. What they add counts where the row did: for its tenant, key, model and endpoint. What a
request comes to is its row and all its corrections; no number of it goes below zero, or past ``MAX_EACH``.
"""

from __future__ import annotations

import time

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.chains import GENESIS, Chain, opened
from gateway.ledger.entry import Entry
from gateway.store import new_id

GATEWAY = "corrections"
"""Instead of a gateway's name, of the chain."""
STATUS = 200
DIFFERENCES = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_completion_tokens",
    "num_reasoning_tokens",
    "engine_us",
    "cost_micros",
)
"""What can be corrected."""
MAX_EACH = 2**53
"""Of each of them, what one request can come to: JSON's readers count so far exactly, and sums over many requests stay
what a database can hold."""


class Refused(Exception):
    """The correction cannot be made: of ``field``, the message says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Absent(Exception):
    """There is no row of such a request."""


async def correct(connection: AsyncConnection, request_id: str, reason: str, differences: dict[str, int]) -> Entry:
    """The new row. The transaction must be one that changes come in one after the other (``Store.changing``). Raises
    Absent and Refused, and what the database raises."""
    rows = store.ledger.c
    row = (await connection.execute(sa.select(store.ledger).where(rows.request_id == request_id))).first()
    if row is None:
        raise Absent
    corrected = Entry(*row)
    if corrected.corrects is not None:
        raise Refused("request_id", f"is a correction itself; correct {corrected.corrects}")
    sums = sa.select(*(sa.func.coalesce(sa.func.sum(rows[name]), 0) for name in DIFFERENCES))
    so_far = (await connection.execute(sums.where(rows.corrects == request_id))).one()
    _check(corrected, dict(zip(DIFFERENCES, map(int, so_far), strict=True)), differences)
    entry = msgspec.structs.replace(
        corrected,
        request_id=new_id("corr"),
        status=STATUS,
        finish_reason=None,
        num_sequences=0,
        created_at=int(time.time()),
        queue_ms=0.0,
        ttft_ms=None,
        duration_ms=0.0,
        trace_id=None,
        corrects=request_id,
        reason=reason,
        **dict.fromkeys(("num_drafted_tokens", "num_accepted_tokens", "kv_block_ms", *DIFFERENCES), 0) | differences,
    )
    placed = (await _chain(connection)).extend(entry, entry.created_at)
    await connection.execute(sa.insert(store.ledger), msgspec.structs.asdict(placed))
    return placed


def _check(corrected: Entry, so_far: dict[str, int], differences: dict[str, int]) -> None:
    """Raises Refused unless what remains is what a request can have."""
    before = {name: getattr(corrected, name) + so_far[name] for name in DIFFERENCES}
    after = {name: value + differences.get(name, 0) for name, value in before.items()}
    for name, value in after.items():
        if value < 0:
            raise Refused(name, f"would leave {value}: the row and its corrections come to {before[name]}")
        if value > max(MAX_EACH, before[name]):
            raise Refused(name, f"would leave {value}, and no request comes to more than {MAX_EACH}")
    for part, whole in (("num_cached_tokens", "num_prompt_tokens"), ("num_reasoning_tokens", "num_completion_tokens")):
        if after[part] > after[whole]:
            raise Refused(part, f"would be {after[part]} of {after[whole]} tokens: correct {whole} too")


async def _chain(connection: AsyncConnection) -> Chain:
    """The end of the corrections' chain, which the first one opens."""
    chains, rows = store.ledger_chains, store.ledger.c
    known = sa.select(chains.c.id).where(chains.c.gateway == GATEWAY)
    number = (await connection.execute(known)).scalar_one_or_none()
    if number is None:
        number = await opened(connection, GATEWAY)
    of_chain = sa.select(rows.position, rows.settled_at, rows.link).where(rows.chain == number)
    last = (await connection.execute(of_chain.order_by(rows.position.desc()).limit(1))).first()
    return Chain(number) if last is None else Chain(number, last.position, last.settled_at, last.link or GENESIS)
