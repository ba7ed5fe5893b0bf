"""What the store keeps for tenants for a time, so that every gateway that shares it finds it, and a restart loses none.

It is kept for so long and takes so much room as the settings say: what has expired is deleted, and of a tenant that
has more than its bytes what would expire first. What is kept, its shelf says (``responses.shelf``, ``chats.shelf``,
``conversations.shelf``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.background import alongside
from gateway.clock import Clock
from gateway.errors import ServiceUnavailable
from gateway.store import Edition, Store
from policies import settings

log = logging.getLogger(__name__)

SWEEP_S = 4.0
PATIENCE_S, RETRY_S = 2.0, 2.0
"""How long the database may take, and how long it is left alone after that; answers wait for it."""
PIECE_BYTES = 4 << 20
"""Of much that one request needs, what is read at once: else it takes too long, and the database is left alone by all
tenants."""
MAX_AT_ONCE = 500
"""Deleted in one transaction; what is left over goes with the next one."""

Row = tuple[sa.Table, dict[str, Any]]
Step = Callable[[AsyncConnection], Coroutine[Any, Any, None]]
"""Of a transaction."""


class ShelfAway(ServiceUnavailable):
    """The store of what is kept cannot be reached now."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Stored {what} cannot be reached at the moment. Please try again.", retry_after_s=1.0)


S = TypeVar("S", bound="Shelving")
P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")


def pieces(sizes: Mapping[K, int]) -> Iterator[list[K]]:
    """All of those whose sizes these are, in their order: so many at a time as have ``PIECE_BYTES`` together."""
    some, num_bytes = list[K](), 0
    for each, size in sizes.items():
        if some and num_bytes + size > PIECE_BYTES:
            yield some
            some, num_bytes = [], 0
        some.append(each)
        num_bytes += size
    if some:
        yield some


def in_time(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """``method``, or ShelfAway: when the database cannot be reached, when it takes too long, and for a while after
    that."""

    @functools.wraps(method)
    async def asked(shelf: S, /, *given: P.args, **named: P.kwargs) -> R:
        return await shelf.reached(method(shelf, *given, **named))

    return asked


class Shelving:
    """All that is kept of one kind. What reaches the database raises ShelfAway when that cannot be reached."""

    what: ClassVar[str]
    """The kind, in the plural."""
    rows: ClassVar[sa.Table]
    """One for each: ``id``, ``tenant_id``, ``num_bytes``, ``created_at`` and ``expires_at`` (Unix seconds)."""
    named_by: ClassVar[sa.Column[Any]]
    """Of the rows beside those, the id that they belong to."""

    def __init__(
        self, rooms: Store, config: settings.Responses, clock: Clock, wall: Callable[[], float] = time.time
    ) -> None:
        """``wall``: Unix seconds; what is kept expires by them."""
        self._rooms = rooms
        self._engine = rooms.engine
        self._config = config
        self._clock = clock
        self._wall = wall
        self._waiting: list[tuple[Sequence[Row], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._swept: Edition | None = None
        """The store as it was before it was last looked through."""
        self._due_at = 0.0
        """When a time is over next of what is in it."""

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, what has expired goes."""
        async with alongside(self._sweep_forever()):
            yield
        if self._writing is not None:
            await asyncio.wait([self._writing])

    @in_time
    async def delete(self, tenant_id: str, kept_id: str) -> bool:
        """Whether there was one."""
        rows = self.rows
        async with self._engine.begin() as connection:
            gone = sa.delete(rows).where(rows.c.id == kept_id, rows.c.tenant_id == tenant_id)
            was_there = bool((await connection.execute(gone)).rowcount)
            if was_there:
                await connection.execute(sa.delete(self.named_by.table).where(self.named_by == kept_id))
        return was_there

    async def sweep(self) -> None:
        """What has expired, or is too much: nothing more than last time where nothing was written and no time is over
        since."""
        edition = await self._rooms.edition()
        if edition != self._swept or self._wall() >= self._due_at:
            await self._sweep()
            async with self._engine.connect() as connection:
                times = [(await connection.execute(query)).scalar() for query in self._times()]
            self._swept, self._due_at = edition, min((at for at in times if at is not None), default=math.inf)

    def _times(self) -> list[sa.Select[Any]]:
        """What tells when the next time is over."""
        return [sa.select(sa.func.min(self.rows.c.expires_at))]

    async def _sweep(self) -> None:
        rows, max_bytes = self.rows, self._config.max_bytes_per_tenant
        await self._delete(sa.select(rows.c.id).where(rows.c.expires_at <= int(self._wall())))
        query = sa.select(rows.c.tenant_id).group_by(rows.c.tenant_id)
        async with self._engine.connect() as connection:
            query = query.having(sa.func.sum(rows.c.num_bytes) > max_bytes)
            tenant_ids = (await connection.execute(query)).scalars().all()
        for tenant_id in tenant_ids:
            newest = rows.c.expires_at.desc(), rows.c.id.desc()
            total = sa.func.sum(rows.c.num_bytes).over(order_by=newest).label("total")
            summed = sa.select(rows.c.id, total).where(rows.c.tenant_id == tenant_id).subquery()
            await self._delete(sa.select(summed.c.id).where(summed.c.total > max_bytes))

    def _put(self, row: dict[str, Any], others: Sequence[Row] = ()) -> asyncio.Future[None]:
        """A new one, with rows that belong to it; durable when what is returned is done. Those that come at the same
        time share a commit."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((self._row(row), *others), done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return done

    def _row(self, row: dict[str, Any]) -> Row:
        """Of a new one, with its times."""
        return self.rows, {"created_at": int(self._wall()), **row, "expires_at": self._expires_at()}

    def _expires_at(self) -> int:
        """Of what is kept from now on."""
        return int(self._wall() + self._config.retention_s)

    async def _delete(self, query: sa.Select[tuple[str]]) -> None:
        async with self._engine.connect() as connection:
            ids = (await connection.execute(query.limit(MAX_AT_ONCE))).scalars().all()
        if ids:
            async with self._engine.begin() as connection:
                await connection.execute(sa.delete(self.rows).where(self.rows.c.id.in_(ids)))
                await connection.execute(sa.delete(self.named_by.table).where(self.named_by.in_(ids)))

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            try:
                await self.sweep()
            except ShelfAway:
                continue
            except Exception as error:
                if not isinstance(error, SQLAlchemyError | OSError) or not store.is_away(error):
                    log.exception("stored %s cannot be looked through", self.what)

    @in_time
    async def _insert(self, new: Sequence[Row]) -> None:
        by_table: dict[sa.Table, list[dict[str, Any]]] = {}
        for table, row in new:
            by_table.setdefault(table, []).append(row)
        async with self._engine.begin() as connection:
            for table, its_rows in by_table.items():
                await connection.execute(sa.insert(table), its_rows)

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            failure: Exception | None = None
            try:
                await self._insert([row for rows, _ in taken for row in rows])
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
            raise ShelfAway(self.what)
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
            log.warning("stored %s cannot be reached: %s", self.what, " ".join(str(error).split())[:300])
            raise ShelfAway(self.what) from None


def _ignore(attempt: asyncio.Future[Any]) -> None:
    if not attempt.cancelled():
        attempt.exception()
