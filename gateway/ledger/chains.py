"""Chains: each start of a gateway writes its rows into one (or another, from where the system's time was set back), and
a row's link is a hash over the link before it and the row, so that one that was changed, taken out or put in between
shows.

A place in a chain is given once. A row whose request has one elsewhere already (two have settled it) is not written a
second time; what stands at its place then is a repeat, which keeps its bytes.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.entry import Entry
from gateway.store import Store
from gateway.store.upserts import insert_for

GENESIS = bytes(32)
"""The link before the first row."""

AHEAD_S = 60
"""A chain may be ahead of the system's time by so much; where that is set back by more, another chain is begun."""
NUM_LATER = 2
"""Columns that came after the link."""
_FEWER = b"\xdc" + (len(Entry.__struct_fields__) - NUM_LATER).to_bytes(2, "big")
"""How MessagePack begins an array of the columns before them."""
assert Entry.__struct_fields__[-NUM_LATER - 1] == "link"

_encode = msgspec.msgpack.Encoder().encode


class Chain:
    """The end of one chain, where rows are added."""

    def __init__(self, number: int, position: int = 0, settled_at: int = 0, link: bytes = GENESIS) -> None:
        """``position`` and what follows: of its last row."""
        self.number = number
        self._position = position
        self._settled_at = settled_at
        self._link = link

    def is_ahead(self, now: int) -> bool:
        """Of the system's time, which was set back: rows would go on being dated later than they are."""
        return self._settled_at > now + AHEAD_S

    def extend(self, entry: Entry, now: int) -> Entry:
        """The entry with its place. ``now`` in Unix seconds; a chain's time does not go back, whatever the system's
        does."""
        self._settled_at = max(self._settled_at, now)
        self._position += 1
        placed = msgspec.structs.replace(
            entry, settled_at=self._settled_at, chain=self.number, position=self._position, link=None
        )
        self._link = link_of(self._link, content_of(placed))
        msgspec.structs.force_setattr(placed, "link", self._link)  # of our own copy, which nobody has seen yet
        return placed


def content_of(entry: Entry) -> bytes:
    """What the link is over: MessagePack's array of the columns in their order, the link null. The columns that came
    after it are left out where they say nothing, so that links of rows from before they were there still hold."""
    encoded = _encode(entry if entry.link is None else msgspec.structs.replace(entry, link=None))
    if entry.upstream is None and entry.counted_by is None:
        return _FEWER + encoded[len(_FEWER) : -NUM_LATER]  # a null is one byte
    return encoded


def content_of_row(row: Sequence[Any]) -> bytes:
    """The same of the table's columns."""
    return content_of(Entry(*row))


def link_of(previous: bytes, content: bytes) -> bytes:
    """The link of a row, 32 bytes."""
    return hashlib.sha256(previous + content).digest()


async def open_chain(rooms: Store) -> Chain:
    """A new one, for a gateway that starts. Raises what the database raises."""
    async with rooms.engine.begin() as connection:
        return Chain(await opened(connection, f"{socket.gethostname()}:{os.getpid()}"))


async def opened(connection: AsyncConnection, gateway: str) -> int:
    """The number of a new chain: the Unix second, or one more than the last. A store that was restored does not know
    the chains that were opened after its backup, and their rows may wait in a spool, so no number comes again."""
    columns, now = store.ledger_chains.c, int(time.time())
    following = sa.func.coalesce(sa.func.max(columns.id), 0) + 1
    number = sa.case((following > now, following), else_=now)
    row = sa.select(number, sa.literal(now, sa.BigInteger), sa.literal(gateway)).where(sa.true())
    statement = insert_for(connection.dialect.name)(store.ledger_chains).from_select(
        ["id", "opened_at", "gateway"], row
    )
    statement = statement.on_conflict_do_nothing().returning(columns.id)
    while (given := (await connection.execute(statement)).scalar_one_or_none()) is None:
        pass  # another gateway that started has just taken it
    return int(given)
