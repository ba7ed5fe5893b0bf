"""Where stored responses lie: in the store, so that every gateway that shares it finds them, and a restart loses none.

They are kept for so long and take so much of it as the settings say: what has expired is deleted, and of a tenant that
has more than its bytes the oldest. A response that is still being written is renewed by the gateway that writes it;
one that was not renewed for ``LEASE_S`` has lost its gateway, and is said to have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from gateway import store
from gateway.background import alongside
from gateway.clock import Clock
from gateway.errors import InvalidRequest, ServiceUnavailable
from gateway.responses.items import AnyItem
from gateway.responses.shapes import OPEN, ResponseBody, ResponseError, Status
from gateway.store import Store
from policies import settings

log = logging.getLogger(__name__)

LEASE_S = 12
SWEEP_S = 4.0
PATIENCE_S, RETRY_S = 2.0, 2.0
"""How long the database may take, and how long it is left alone after that; answers wait for it."""
MAX_CHAIN = 1000
"""Responses that one may go on from, one behind the other."""
_ID = re.compile("resp_[0-9a-f]{32}")
LOST = ResponseError("server_error", "The gateway that wrote this response is gone; it was not finished.")

rows, told = store.responses, store.response_events
_encode = msgspec.json.encode
_body = msgspec.json.Decoder(ResponseBody)
_items = msgspec.json.Decoder(list[AnyItem])


class ShelfAway(ServiceUnavailable):
    """The store of responses cannot be reached now."""

    def __init__(self) -> None:
        super().__init__("Stored responses cannot be reached at the moment. Please try again.", retry_after_s=1.0)


P = ParamSpec("P")
R = TypeVar("R")


def in_time(
    method: Callable[Concatenate[Shelf, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Shelf, P], Coroutine[Any, Any, R]]:
    """``method``, or ShelfAway: when the database cannot be reached, when it takes too long, and for a while after
    that."""

    @functools.wraps(method)
    async def asked(shelf: Shelf, /, *given: P.args, **named: P.kwargs) -> R:
        return await shelf.reached(method(shelf, *given, **named))

    return asked


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
    def is_open(self) -> bool:
        """It is not written to its end."""
        return self.status in OPEN

    def response(self) -> ResponseBody:
        return _body.decode(self.body)

    def items(self) -> list[AnyItem]:
        """What it was given, and for itself alone."""
        return _items.decode(self.input)


class Shelf:
    """All of them. What reaches the database raises ShelfAway when that cannot be reached."""

    def __init__(
        self, rooms: Store, config: settings.Responses, clock: Clock, wall: Callable[[], float] = time.time
    ) -> None:
        """``wall``: Unix seconds; responses expire by them."""
        self._engine = rooms.engine
        self._is_alone = rooms.database is not None
        self._config = config
        self._clock = clock
        self._wall = wall
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, what has expired goes, and what is lost is said to be. A gateway that shares its store with
        none knows at once that nobody writes what is open."""
        if self._is_alone:
            await self._say_lost(self._wall() + 1)
        async with alongside(self._sweep_forever()):
            yield
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def put(self, kept: Kept) -> None:
        """A new one, durable when this returns. Those that come at the same time share a commit."""
        now = int(self._wall())
        row = {
            **msgspec.structs.asdict(kept),
            "num_bytes": len(kept.input) + len(kept.body),
            "created_at": now,
            "expires_at": now + int(self._config.retention_s),
            "renewed_at": now,
        }
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await done

    @in_time
    async def find(self, tenant_id: str, response_id: str) -> Kept | None:
        """Of this tenant alone, as are all that are asked for by their id."""
        if not is_id(response_id):
            return None
        query = sa.select(*_columns(rows)).where(rows.c.id == response_id, rows.c.tenant_id == tenant_id)
        async with self._engine.connect() as connection:
            found = (await connection.execute(query.where(rows.c.expires_at > int(self._wall())))).first()
        return None if found is None else Kept(*found)

    @in_time
    async def chain(self, tenant_id: str, response_id: str) -> list[Kept]:
        """The response and all before it, oldest first; if one is missing, without it and those before. Raises
        InvalidRequest when they are too many."""
        if not is_id(response_id):
            return []
        mine, now = rows.c.tenant_id == tenant_id, int(self._wall())
        columns = [*_columns(rows), sa.literal(1).label("depth")]
        first = sa.select(*columns).where(rows.c.id == response_id, mine, rows.c.expires_at > now)
        chain = first.cte("chain", recursive=True)
        columns = [*_columns(rows), (chain.c.depth + 1).label("depth")]
        more = sa.select(*columns).join(chain, rows.c.id == chain.c.previous_id)
        chain = chain.union_all(more.where(mine, rows.c.expires_at > now, chain.c.depth <= MAX_CHAIN))
        query = sa.select(*[chain.c[column.name] for column in _columns(rows)]).order_by(chain.c.depth.desc())
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).all()
        if len(found) > MAX_CHAIN:
            raise InvalidRequest(
                f"This conversation is too long: a response may go on from {MAX_CHAIN} others at most",
                param="previous_response_id",
            )
        return [Kept(*row) for row in found]

    @in_time
    async def delete(self, tenant_id: str, response_id: str) -> bool:
        """Whether there was one. If it is still being written, whoever does so notices."""
        async with self._engine.begin() as connection:
            gone = sa.delete(rows).where(rows.c.id == response_id, rows.c.tenant_id == tenant_id)
            was_there = bool((await connection.execute(gone)).rowcount)
            if was_there:
                await connection.execute(sa.delete(told).where(told.c.response_id == response_id))
        return was_there

    @in_time
    async def advance(self, body: ResponseBody, first: int, events: Sequence[bytes]) -> bool:
        """It is being written, or has ended, by its status; ``events`` are those from number ``first`` on. False, and
        nothing is done: it had ended already, or is gone."""
        whole, said = _encode(body), zlib.compress(b"".join(events), 1)
        is_open = rows.c.status.in_(OPEN)
        changed = sa.update(rows).where(rows.c.id == body.id, is_open)
        num_more = len(said) if events else 0
        changed = changed.values(
            status=body.status,
            body=whole,
            num_bytes=rows.c.num_bytes - sa.func.length(rows.c.body) + len(whole) + num_more,
            renewed_at=int(self._wall()),
        )
        async with self._engine.begin() as connection:
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
            said += split(zlib.decompress(compressed))[max(0, first - start) :]
        return said

    async def end_elsewhere(self, kept: Kept, status: Status, error: ResponseError | None = None) -> bool:
        """Ends one that another gateway writes, or wrote; that one notices. False: it had ended already."""
        number = await self._num_told(kept.id)
        body = msgspec.structs.replace(kept.response(), status=status, error=error)
        kind = "incomplete" if status == "cancelled" else status
        said = {"type": f"response.{kind}", "sequence_number": number, "response": body}
        event = b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _encode(said))
        return await self.advance(body, number, [event])

    @in_time
    async def _num_told(self, response_id: str) -> int:
        query = sa.select(sa.func.max(told.c.first + told.c.num_events)).where(told.c.response_id == response_id)
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).scalar() or 0

    async def sweep(self) -> None:
        """What has expired, is too much, or is lost."""
        now = int(self._wall())
        await self._delete(sa.select(rows.c.id).where(rows.c.expires_at <= now))
        query = sa.select(rows.c.tenant_id).group_by(rows.c.tenant_id)
        query = query.having(sa.func.sum(rows.c.num_bytes) > self._config.max_bytes_per_tenant)
        async with self._engine.connect() as connection:
            tenant_ids = (await connection.execute(query)).scalars().all()
        for tenant_id in tenant_ids:
            newest = rows.c.created_at.desc(), rows.c.id.desc()
            total = sa.func.sum(rows.c.num_bytes).over(order_by=newest).label("total")
            summed = sa.select(rows.c.id, total).where(rows.c.tenant_id == tenant_id).subquery()
            await self._delete(sa.select(summed.c.id).where(summed.c.total > self._config.max_bytes_per_tenant))
        await self._say_lost(now - LEASE_S)

    async def _delete(self, query: sa.Select[tuple[str]]) -> None:
        async with self._engine.connect() as connection:
            ids = (await connection.execute(query.limit(500))).scalars().all()
        if ids:
            async with self._engine.begin() as connection:
                await connection.execute(sa.delete(rows).where(rows.c.id.in_(ids)))
                await connection.execute(sa.delete(told).where(told.c.response_id.in_(ids)))

    async def _say_lost(self, renewed_before: float) -> None:
        query = sa.select(*_columns(rows)).where(rows.c.status.in_(OPEN), rows.c.renewed_at < int(renewed_before))
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).all()
        for row in found:
            if await self.end_elsewhere(kept := Kept(*row), "failed", LOST):
                log.warning("response %s has lost its gateway", kept.id)

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            try:
                await self.sweep()
            except ShelfAway:
                continue
            except Exception as error:
                if not isinstance(error, SQLAlchemyError | OSError) or not store.is_away(error):
                    log.exception("stored responses cannot be looked through")

    @in_time
    async def _insert(self, new: list[dict[str, Any]]) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(sa.insert(rows), new)

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            failure: Exception | None = None
            try:
                await self._insert([row for row, _ in taken])
            except Exception as error:
                failure = error
            for _, done in taken:
                if done.done():  # nobody waits for it any more
                    continue
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)

    async def reached(self, work: Coroutine[Any, Any, R]) -> R:
        """What ``work`` returns, as ``in_time`` says. What takes too long is left to its end, which a driver may be
        long in finding."""
        if self._clock.now() < self._retry_at:
            work.close()
            raise ShelfAway
        attempt = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([attempt], timeout=PATIENCE_S)
        except asyncio.CancelledError:
            attempt.cancel()
            raise
        try:
            if not done:
                attempt.add_done_callback(_ignore)
                attempt.cancel()
                raise TimeoutError(f"no answer within {PATIENCE_S:g} s")
            return attempt.result()
        except (SQLAlchemyError, OSError) as error:
            if not store.is_away(error):
                raise
            self._retry_at = self._clock.now() + RETRY_S
            log.warning("stored responses cannot be reached: %s", " ".join(str(error).split())[:300])
            raise ShelfAway from None


def _ignore(attempt: asyncio.Future[Any]) -> None:
    if not attempt.cancelled():
        attempt.exception()


def is_id(text: str) -> bool:
    """Of a response. Nothing else reaches a database, which may not take it."""
    return _ID.fullmatch(text) is not None


def split(events: bytes) -> list[bytes]:
    """One by one: none has an empty line within."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    return [table.c[name] for name in Kept.__struct_fields__]
