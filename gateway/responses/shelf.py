"""Where stored responses lie (``gateway/shelving.py``).

A response that is still being written is renewed by the gateway that writes it; one that was not renewed for
``LEASE_S`` has lost its gateway, and is said to have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.clock import Clock
from gateway.errors import InvalidRequest
from gateway.openai.duplicate_keys import LONG_BYTES
from gateway.responses.events import split
from gateway.responses.items import MAX_ITEMS, AnyItem
from gateway.responses.shapes import OPEN, ResponseBody, ResponseError, Status
from gateway.shelving import Shelving, in_time, pieces
from gateway.store import Store
from policies import settings

log = logging.getLogger(__name__)

LEASE_S = 12
MAX_CHAIN = 1000
"""Responses that one may go on from, one behind the other."""
MAX_CHAIN_BYTES = 64 << 20
"""Of all of them together, as they are stored: all of it is read for each that goes on from them."""
SHORT_BYTES = 4 << 10
"""Of events that are packed: what is unpacked of those is never long."""
_ID = re.compile("resp_[0-9a-f]{32}")
LOST = ResponseError("server_error", "The gateway that wrote this response is gone; it was not finished.")

rows, told = store.responses, store.response_events
_encode = msgspec.json.encode
_body = msgspec.json.Decoder(ResponseBody)
_items = msgspec.json.Decoder(list[AnyItem])


class Kept(msgspec.Struct, frozen=True):
    """A stored response."""

    id: str
    tenant_id: str
    previous_id: str | None
    status: Status
    is_background: bool
    input: bytes
    body: bytes

    @classmethod
    def of(cls, tenant_id: str, body: ResponseBody, items: Sequence[AnyItem]) -> Kept:
        given, whole = _encode(items), _encode(body)
        return cls(body.id, tenant_id, body.previous_response_id, body.status, body.background, given, whole)

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.body)

    @property
    def is_open(self) -> bool:
        """It is not written to its end."""
        return self.status in OPEN

    def response(self) -> ResponseBody:
        return _body.decode(self.body)

    def items(self) -> list[AnyItem]:
        """What it was given, and for itself alone."""
        return _items.decode(self.input)


class Shelf(Shelving):
    """All of them."""

    what = "responses"
    rows = rows
    named_by = told.c.response_id

    def __init__(
        self, rooms: Store, config: settings.Responses, clock: Clock, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__(rooms, config, clock, wall)
        self._is_alone = rooms.database is not None
        self._looked_at = clock.now(), wall()
        self._patient_until = 0.0
        """Until then, by ``wall``, nothing is said to be lost: the store was away, and nobody could renew anything, or
        the system's time was set ahead, or stood still with the machine, and nobody has renewed anything yet."""

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """As for all that is kept, and what is lost is said to be. A gateway that shares its store with none knows at
        once that nobody writes what is open."""
        if self._is_alone:
            await self._say_lost(self._wall() + 1)
        async with super().watched():
            yield

    async def put(self, kept: Kept) -> None:
        """A new one, durable when this returns."""
        await self._put(self._told_of(kept))

    async def insert(self, kept: Kept, connection: AsyncConnection) -> None:
        """A new one, in a transaction of somebody else's."""
        table, row = self._row(self._told_of(kept))
        await connection.execute(sa.insert(table), row)

    def _told_of(self, kept: Kept) -> dict[str, Any]:
        num_bytes, renewed_at = kept.num_bytes, int(self._wall())
        return {**msgspec.structs.asdict(kept), "num_bytes": num_bytes, "renewed_at": renewed_at}

    @in_time
    async def find(self, tenant_id: str, response_id: str) -> Kept | None:
        """Of this tenant alone, as are all that are asked for by their id."""
        if not is_id(response_id):
            return None
        query = sa.select(*_columns(rows)).where(rows.c.id == response_id, rows.c.tenant_id == tenant_id)
        async with self._engine.connect() as connection:
            found = (await connection.execute(query.where(rows.c.expires_at > int(self._wall())))).first()
        return None if found is None else Kept(*found)

    async def chain(self, tenant_id: str, response_id: str) -> list[Kept]:
        """The response and all before it, oldest first; if one is missing, without it and those before. Raises
        InvalidRequest when they are too many, or too much."""
        sizes = await self._sizes(tenant_id, response_id) if is_id(response_id) else {}
        _check_size(len(sizes), sum(sizes.values()))
        found: dict[str, Kept] = {}
        for ids in pieces(sizes):
            found |= await self._some(tenant_id, ids)
        there = list(itertools.takewhile(found.__contains__, sizes))
        return [found[each] for each in reversed(there)]

    @in_time
    async def _sizes(self, tenant_id: str, response_id: str) -> dict[str, int]:
        """How many bytes each of a chain has, by their ids, the newest first; of one that is too long no more than
        shows that."""
        mine = rows.c.tenant_id == tenant_id, rows.c.expires_at > int(self._wall())
        size = sa.func.length(rows.c.input) + sa.func.length(rows.c.body)
        links = rows.c.id, rows.c.previous_id, size.label("num_bytes")
        first = sa.select(*links, sa.literal(1).label("depth")).where(rows.c.id == response_id, *mine)
        chain = first.cte("chain", recursive=True)
        more = sa.select(*links, (chain.c.depth + 1).label("depth")).join(chain, rows.c.id == chain.c.previous_id)
        chain = chain.union_all(more.where(*mine, chain.c.depth <= MAX_CHAIN))
        async with self._engine.connect() as connection:
            query = sa.select(chain.c.id, chain.c.num_bytes).order_by(chain.c.depth)
            return {row.id: row.num_bytes for row in await connection.execute(query)}

    @in_time
    async def _some(self, tenant_id: str, ids: Sequence[str]) -> dict[str, Kept]:
        """Those that are there of these, by their ids."""
        query = sa.select(*_columns(rows)).where(rows.c.id.in_(ids), rows.c.tenant_id == tenant_id)
        async with self._engine.connect() as connection:
            return {row.id: Kept(*row) for row in await connection.execute(query)}

    @in_time
    async def advance(self, body: ResponseBody, first: int, events: Sequence[bytes]) -> bool:
        """It is being written, or has ended, by its status; ``events`` are those from number ``first`` on. False, and
        nothing is done: it had ended already, or is gone."""
        async with self._engine.begin() as connection:
            return await self.move(connection, body, first, events)

    async def move(self, connection: AsyncConnection, body: ResponseBody, first: int, events: Sequence[bytes]) -> bool:
        """As ``advance``, in a transaction of somebody else's."""
        whole, said = _encode(body), await _packed(events)
        is_open = rows.c.status.in_(OPEN)
        changed = sa.update(rows).where(rows.c.id == body.id, is_open)
        num_more = len(said) if events else 0
        changed = changed.values(
            status=body.status,
            body=whole,
            num_bytes=rows.c.num_bytes - sa.func.length(rows.c.body) + len(whole) + num_more,
            renewed_at=int(self._wall()),
        )
        if not (await connection.execute(changed)).rowcount:
            return False
        if events:
            # What came to be written although nobody was told so.
            again = sa.delete(told).where(told.c.response_id == body.id, told.c.first >= first)
            await connection.execute(again)
            row = {"response_id": body.id, "first": first, "num_events": len(events), "events": said}
            await connection.execute(sa.insert(told), row)
        return True

    @in_time
    async def events(self, response_id: str, first: int) -> list[bytes]:
        """Those from number ``first`` on that are written down by now."""
        query = sa.select(told.c.first, told.c.events).where(
            told.c.response_id == response_id, told.c.first + told.c.num_events > first
        )
        async with self._engine.connect() as connection:
            found = (await connection.execute(query.order_by(told.c.first))).all()
        said: list[bytes] = []
        for start, compressed in found:
            said += (await _unpacked(compressed))[max(0, first - start) :]
        return said

    @in_time
    async def end_of(self, response_id: str) -> tuple[int, list[bytes]]:
        """The number of the last event that is written down, and that event, if there is one."""
        query = sa.select(told.c.first, told.c.events).where(told.c.response_id == response_id)
        async with self._engine.connect() as connection:
            found = (await connection.execute(query.order_by(told.c.first.desc()).limit(1))).first()
        if found is None:
            return -1, []
        said = await _unpacked(found.events)
        return found.first + len(said) - 1, said[-1:]

    @in_time
    async def end_elsewhere(self, kept: Kept, status: Status, error: ResponseError | None = None) -> bool:
        """Ends one that another gateway writes, or wrote; that one notices. False: it had ended already."""
        body = msgspec.structs.replace(kept.response(), status=status, error=error)
        kind = "incomplete" if status == "cancelled" else status
        is_open = rows.c.id == kept.id, rows.c.status.in_(OPEN)
        last = sa.select(sa.func.max(told.c.first + told.c.num_events)).where(told.c.response_id == kept.id)
        async with self._engine.begin() as connection:
            # This first: whoever writes it waits here, and what others have read of it is not taken back.
            await connection.execute(sa.update(rows).where(*is_open).values(renewed_at=rows.c.renewed_at))
            number = (await connection.execute(last)).scalar() or 0
            said = {"type": f"response.{kind}", "sequence_number": number, "response": body}
            event = b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _encode(said))
            return await self.move(connection, body, number, [event])

    async def sweep(self) -> None:
        await self._rooms.edition()
        before, self._looked_at = self._looked_at, (self._clock.now(), self._wall())
        if any(now > then + LEASE_S / 2 for then, now in zip(before, self._looked_at, strict=True)):
            self._patient_until = self._wall() + LEASE_S
        await super().sweep()

    async def _sweep(self) -> None:
        """And what is lost."""
        await super()._sweep()
        if self._wall() >= self._patient_until:
            await self._say_lost(int(self._wall()) - LEASE_S)

    def _times(self) -> list[sa.Select[Any]]:
        lost_at = sa.func.min(rows.c.renewed_at) + LEASE_S + 1
        return [*super()._times(), sa.select(lost_at).where(rows.c.status.in_(OPEN))]

    async def _say_lost(self, renewed_before: float) -> None:
        query = sa.select(*_columns(rows)).where(rows.c.status.in_(OPEN), rows.c.renewed_at < int(renewed_before))
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).all()
        for row in found:
            if await self.end_elsewhere(kept := Kept(*row), "failed", LOST):
                log.warning("response %s has lost its gateway", kept.id)


async def _packed(events: Sequence[bytes]) -> bytes:
    """As they are stored. Long ones are packed, and unpacked, beside the event loop."""
    if sum(map(len, events)) <= LONG_BYTES:
        return zlib.compress(b"".join(events), 1)
    return await asyncio.to_thread(zlib.compress, b"".join(events), 1)


async def _unpacked(said: bytes) -> list[bytes]:
    if len(said) <= SHORT_BYTES:
        return split(zlib.decompress(said))
    return await asyncio.to_thread(lambda: split(zlib.decompress(said)))


def is_id(text: str) -> bool:
    """Of a response. Nothing else reaches a database, which may not take it."""
    return _ID.fullmatch(text) is not None


async def said_in(chain: Sequence[Kept], num_more: int = 0) -> tuple[list[AnyItem], ResponseBody]:
    """The items of these responses, which their input and their output are, and the first of them. ``num_more`` come
    behind those. Raises InvalidRequest when they are too many: then not all of them are made."""
    if sum(kept.num_bytes for kept in chain) <= LONG_BYTES:
        return _said_in(chain, num_more)
    return await asyncio.to_thread(_said_in, chain, num_more)


def _said_in(chain: Sequence[Kept], num_more: int) -> tuple[list[AnyItem], ResponseBody]:
    first, items = chain[0].response(), list[AnyItem]()
    for kept in chain:
        items += kept.items()
        items += (first if kept is chain[0] else kept.response()).output
        if len(items) + num_more > MAX_ITEMS:
            raise _too_long(f"all that was said in it may have {MAX_ITEMS} items at most")
    return items, first


def _check_size(num: int, num_bytes: int) -> None:
    if num > MAX_CHAIN:
        raise _too_long(f"a response may go on from {MAX_CHAIN} others at most")
    if num_bytes > MAX_CHAIN_BYTES:
        raise _too_long(
            f"the {num} responses that it goes on from have {num_bytes} bytes, and may have {MAX_CHAIN_BYTES} at most"
        )


def _too_long(why: str) -> InvalidRequest:
    return InvalidRequest(f"This conversation is too long: {why}", param="previous_response_id")


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    return [table.c[name] for name in Kept.__struct_fields__]
