"""Closing the books: once a day is over, which rows it has is settled for good, under one digest.

A day's closings say for each chain which places are its own: the rows that were there without a gap and settled before
its end, from where the closing before ended. A row that arrives later, from a spool, falls to the next day that is
closed. A day's digest is over the digest of the day before and its closings, each with the link of its last row: who
keeps a digest elsewhere holds all rows until then to it. Days are closed one after the other, those without rows too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, date, datetime
from typing import NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.background import alongside
from gateway.clock import Clock
from gateway.ledger.chains import AHEAD_S, GENESIS
from gateway.ledger.follow import Follower
from gateway.store import Store
from gateway.store.wall import NOW

log = logging.getLogger(__name__)

DAY_S = 86_400
LOOK_S = 60.0
AT_ONCE = 10_000
"""Places that are looked at together in search of a gap."""


class Cut(NamedTuple):
    """The places of one chain that belong to a day, and the link of the last of them."""

    chain: int
    first_position: int
    last_position: int
    last_link: bytes


class Day(msgspec.Struct, frozen=True):
    """One that is closed."""

    day: str
    """As 2026-11-21, in UTC; in the store, and everywhere else here, they are counted from 1970."""
    num_rows: int
    digest: str
    """Hexadecimal."""


def day_of(unix_s: float) -> int:
    return int(unix_s // DAY_S)


def name_of(day: int) -> str:
    """As 2026-11-21."""
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def number_of(day: date) -> int:
    return day.toordinal() - date(1970, 1, 1).toordinal()


def digest_of(previous: bytes, day: int, cuts: Iterable[Cut]) -> bytes:
    """32 bytes; the cuts in the order of their chains. ``previous``: of the day before, GENESIS before the first."""
    return hashlib.sha256(previous + msgspec.msgpack.encode((day, list(cuts)))).digest()


async def close_next(rooms: Store, before: int, now: float) -> Day | None:
    """Closes the oldest day that is open, unless it is ``before`` or a later one; None: there was none to close. Raises
    what the database raises."""
    while True:
        async with rooms.engine.connect() as connection:
            day, previous = await _oldest_open(connection)
            if day is None or day >= before:
                return None
            cuts, num_rows = await _cuts(connection, (day + 1) * DAY_S)
        digest = digest_of(previous, day, cuts)
        row = {"day": day, "num_rows": num_rows, "digest": digest, "closed_at": int(now)}
        try:
            async with rooms.engine.begin() as connection:
                await connection.execute(sa.insert(store.ledger_days), row)
                if cuts:
                    closings = [{"day": day, **cut._asdict()} for cut in cuts]
                    await connection.execute(sa.insert(store.ledger_closings), closings)
        except IntegrityError:  # another has closed it meanwhile
            continue
        shown = Day(name_of(day), num_rows, digest.hex())
        log.info("ledger: %s is closed with %d rows; its digest is %s", shown.day, shown.num_rows, shown.digest)
        return shown


class Closing:
    """Closes each day some time after its end."""

    def __init__(self, rooms: Store, clock: Clock, close_after_s: float, wall: Callable[[], float] = time.time) -> None:
        self._rooms = rooms
        self._clock = clock
        self._close_after_s = close_after_s
        self._wall = wall
        self._follower = Follower(rooms, "closing")
        self._failure: str | None = None
        self._is_ahead = False

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, days are closed when they are due."""
        async with alongside(self._watch()):
            yield

    async def close_due(self) -> None:
        """Leaves it to another gateway that is about it. Raises what the database raises."""
        async with self._follower.alone() as is_alone:
            if is_alone:
                now = await self._earlier(self._wall())
                while await close_next(self._rooms, day_of(now - self._close_after_s), now):
                    pass

    async def _earlier(self, now: float) -> float:
        """This machine's time or PostgreSQL's, whichever is earlier: a clock that is far ahead would close days in
        which others still write. Raises what the database raises."""
        if self._rooms.database is not None:  # it is a file, and has no other clock
            return now
        async with self._rooms.engine.connect() as connection:
            there = float((await connection.execute(NOW)).scalar_one())
        if now > there + AHEAD_S and not self._is_ahead:
            ahead_s = now - there
            log.warning("ledger: this clock is %.0f s ahead of the database's, by which days are closed", ahead_s)
        self._is_ahead = now > there + AHEAD_S
        return min(now, there)

    async def _watch(self) -> None:
        while True:
            try:
                await self.close_due()
            except (SQLAlchemyError, OSError) as error:
                self._say(store.cause_of(error))
            except Exception:
                log.exception("ledger: a day cannot be closed")
            else:
                self._failure = None
            await self._clock.sleep(LOOK_S)

    def _say(self, failure: str) -> None:
        """Once when it begins."""
        if self._failure is None:
            log.error("ledger: a day cannot be closed: %s", failure)
        self._failure = failure


async def _oldest_open(connection: AsyncConnection) -> tuple[int | None, bytes]:
    """The day, and the digest of the one before it. No row is older than its chain."""
    days = store.ledger_days.c
    last = (await connection.execute(sa.select(days.day, days.digest).order_by(days.day.desc()).limit(1))).first()
    if last is not None:
        return last.day + 1, last.digest
    opened_at = (await connection.execute(sa.select(sa.func.min(store.ledger_chains.c.opened_at)))).scalar_one()
    return None if opened_at is None else day_of(opened_at), GENESIS


async def _cuts(connection: AsyncConnection, end: int) -> tuple[list[Cut], int]:
    """What there is to close of rows that were settled before ``end``, and how many rows it is."""
    chains, closings, rows, places = (
        store.ledger_chains.c,
        store.ledger_closings.c,
        store.ledger.c,
        store.ledger_repeats.c,
    )
    closed = (
        sa.select(closings.chain, sa.func.max(closings.last_position).label("position"))
        .group_by(closings.chain)
        .subquery("closed")
    )
    position = sa.func.coalesce(closed.c.position, 0)
    has_row = sa.select(rows.position).where(rows.chain == chains.id, rows.position == position + 1).limit(1)
    is_repeat = sa.exists().where(places.chain == chains.id, places.position == position + 1)
    query = (
        sa.select(chains.id, position)
        .select_from(store.ledger_chains.outerjoin(closed, closed.c.chain == chains.id))
        .where(has_row.scalar_subquery().is_not(None) | is_repeat)
        .order_by(chains.id)
    )
    cuts, num_rows = [], 0
    for chain, last_closed in (await connection.execute(query)).all():
        last, num_in_chain = await _end_of(connection, chain, last_closed, end)
        if last > last_closed:
            of_last = sa.select(rows.link).where(rows.chain == chain, rows.position == last)
            link = (await connection.execute(of_last)).scalars().first() or GENESIS
            cuts.append(Cut(chain, last_closed + 1, last, link))
            num_rows += num_in_chain
    return cuts, num_rows


async def _end_of(connection: AsyncConnection, chain: int, begin: int, end: int) -> tuple[int, int]:
    """The last place behind ``begin`` that was settled before ``end`` and is reached without a gap, ``begin`` if there
    is none; and the rows until there."""
    rows, places = store.ledger.c, store.ledger_repeats.c
    is_ours = (rows.chain == chain) & (rows.position > begin) & (rows.settled_at < end)
    counted = sa.select(sa.func.count(), sa.func.max(rows.position)).where(is_ours)
    num_rows, last = (await connection.execute(counted)).one()
    if not num_rows:
        return begin, 0
    is_between = (places.chain == chain) & (places.position > begin) & (places.position < last)
    repeats = sa.select(sa.func.count()).select_from(store.ledger_repeats).where(is_between)
    if num_rows + (await connection.execute(repeats)).scalar_one() == last - begin:
        return last, num_rows
    return await _end_before_gap(connection, chain, begin, is_ours, is_between)


async def _end_before_gap(
    connection: AsyncConnection,
    chain: int,
    begin: int,
    is_ours: sa.ColumnElement[bool],
    is_between: sa.ColumnElement[bool],
) -> tuple[int, int]:
    rows, places = store.ledger.c, store.ledger_repeats.c
    both = sa.union_all(
        sa.select(rows.position, sa.literal(1).label("is_row")).where(is_ours),
        sa.select(places.position, sa.literal(0)).where(is_between),
    ).subquery("places")
    last, num_rows, last_row, num_at_row = begin, 0, begin, 0
    while True:
        query = sa.select(both).where(both.c.position > last).order_by(both.c.position).limit(AT_ONCE)
        found = (await connection.execute(query)).all()
        for position, is_row in found:
            if position > last + 1:
                return last_row, num_at_row
            last = position
            if is_row:
                num_rows += 1
                last_row, num_at_row = last, num_rows
        if not found:
            return last_row, num_at_row
