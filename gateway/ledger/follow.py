"""Reading the ledger as it grows: a follower sees each row once, in the order of the row's chain.

A follower has a name, and under it a cursor for each chain. It reads what stands right behind the cursor and stops at
the first gap, since rows may arrive late from a spool. The cursor moves in a transaction of the follower's own: what
else that transaction does is done exactly once, and what is done before it, such as sending, at least once. Of the
gateways that share a store one at a time is ``alone`` with a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import zlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.entry import Entry
from gateway.store import Store
from gateway.store.upserts import insert_for

LOCKS = 0x666F6C6C
"""The first half of the advisory locks ("foll") under which followers of one PostgreSQL take turns."""
MAX_STRAYS = 1000
"""Rows without a place that are given one at once."""
WAITING = "<"
"""Between a follower's name and the last position of a gap that it has stepped over."""
NO_CHAIN = 0
"""Of rows from before there were chains."""


_COUNTED = sa.select(sa.func.count(), sa.func.max(store.ledger.c.position)).where(
    store.ledger.c.chain == sa.bindparam("chain"),
    store.ledger.c.position > sa.bindparam("first"),
    store.ledger.c.position <= sa.bindparam("last"),
)
"""How many rows there are, and the last of them."""


class Overtaken(Exception):
    """Another has moved this follower's cursor meanwhile: nothing was done, and what was read is to be read again."""


class Move(NamedTuple):
    """Of the cursor of one chain, by positions."""

    chain: int
    from_: int
    to: int


class Batch(NamedTuple):
    """What comes next: rows of one chain after those of another, each in order, and where reading them leads. It leads
    past places without a row of their own, since the row stands elsewhere (``chains``)."""

    entries: Sequence[Entry]
    moves: Sequence[Move]

    def __bool__(self) -> bool:
        return bool(self.moves)


class Follower:
    """One reader of the ledger; a name has the same cursors in every gateway and after every start."""

    def __init__(self, rooms: Store, name: str, until: int | None = None) -> None:
        """``name``: such as "usage" or "sink:stripe", of letters that a file can be called by, and colons. ``until``:
        the last position that it waits for, in the chains of which it has a cursor; None: all there will be."""
        self.name = name
        self._rooms = rooms
        self._until = until

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[bool]:
        """True: nobody else is it under this name until this is left. False, at once: somebody is. Raises what the
        database raises."""
        if self._rooms.database is None:
            async with self._alone_in_postgres() as is_alone:
                yield is_alone
        else:
            with self._alone_in_the_directory() as is_alone:
                yield is_alone

    async def next(self, max_rows: int, before: int | None = None, but: Collection[int] = ()) -> Batch:
        """At most ``max_rows`` that follow each chain's cursor without a gap, and were settled before ``before`` (Unix
        s); empty: there are none at the moment. ``but``: chains to leave out. Raises what the database raises."""
        await number_strays(self._rooms)
        entries: list[Entry] = []
        moves = []
        async with self._rooms.engine.connect() as connection:
            chains = _chains_with_a_next_row(self.name, self._until is None)
            for chain, position in await connection.execute(chains):
                if chain in but:
                    continue
                run, last = await self._run_of(connection, chain, position, max_rows - len(entries), before)
                if last > position:
                    entries += run
                    moves.append(Move(chain, position, last))
                if len(entries) >= max_rows:
                    break
        return Batch(entries, moves)

    async def stretch(self, max_rows: int, but: Collection[int]) -> Move | None:
        """Where rows follow one chain's cursor with neither a gap nor a repeat: at most so many, and none of them read.
        None: there are no such rows, though ``next`` may find some. ``but``: chains to leave out. Raises what the
        database raises."""
        await number_strays(self._rooms)
        async with self._rooms.engine.connect() as connection:
            chains = _chains_with_a_next_row(self.name, self._until is None)
            for chain, position in (await connection.execute(chains)).all():
                if chain in but:
                    continue
                end = position + max_rows if self._until is None else min(self._until, position + max_rows)
                place = {"chain": chain, "first": position, "last": end}
                num_rows, last = (await connection.execute(_COUNTED, place)).one()
                if num_rows and last == position + num_rows:
                    return Move(chain, position, last)
        return None

    @contextlib.asynccontextmanager
    async def past(self, batch: Batch) -> AsyncIterator[AsyncConnection]:
        """A transaction in which the cursors have moved past the batch. It commits on leaving, or changes nothing when
        an exception leaves it. Raises Overtaken, and what the database raises."""
        async with self._rooms.engine.begin() as connection:
            for move in batch.moves:  # first of all: SQLite's readers cannot become writers behind another's back
                await self._move(connection, move)
            yield connection

    async def positions(self, connection: AsyncConnection) -> dict[int, int]:
        """Where the cursor of each chain stands; a chain that is not there has not been begun."""
        columns = store.ledger_cursors.c
        query = sa.select(columns.chain, columns.position).where(columns.follower == self.name)
        return {row.chain: row.position for row in await connection.execute(query)}

    async def step_over(self, settled_before: int) -> tuple[list[Move], bool]:
        """Goes on behind those gaps whose next row was settled before then (Unix s), and leaves somebody to wait for
        what is missing (``waiting``). The gaps, each as a move from the row before it to its last place, and whether
        there are others. To be called alone. Raises Overtaken, and what the database raises."""
        columns = store.ledger.c
        async with self._rooms.engine.connect() as connection:
            found = (await connection.execute(_gaps(self.name))).all()
            gaps = []
            for chain, position, next_position in found:
                settled = sa.select(columns.settled_at).where(columns.chain == chain, columns.position == next_position)
                if (await connection.execute(settled)).scalar_one() < settled_before:
                    gaps.append(Move(chain, position, next_position - 1))
        for gap in gaps:
            async with self._rooms.engine.begin() as connection:
                await self._move(connection, gap)
                row = {"follower": f"{self.name}{WAITING}{gap.to}", "chain": gap.chain, "position": gap.from_}
                await connection.execute(sa.insert(store.ledger_cursors), row)
        return gaps, len(gaps) < len(found)

    async def waiting(self) -> list[Follower]:
        """Who waits for the rows of gaps that were stepped over, and has not got them all."""
        async with self._rooms.engine.connect() as connection:
            gaps = await gaps_of(connection, self.name)
        return [
            Follower(self._rooms, f"{self.name}{WAITING}{until}", until) for until in sorted({gap.to for gap in gaps})
        ]

    async def _move(self, connection: AsyncConnection, move: Move) -> None:
        columns = store.ledger_cursors.c
        if move.from_ or self._until is not None:
            moved = sa.update(store.ledger_cursors).values(position=move.to)
            statement: Any = moved.where(
                columns.follower == self.name, columns.chain == move.chain, columns.position == move.from_
            )
        else:
            row = {"follower": self.name, "chain": move.chain, "position": move.to}
            statement = insert_for(connection.dialect.name)(store.ledger_cursors).values(row).on_conflict_do_nothing()
        if (await connection.execute(statement)).rowcount != 1:
            raise Overtaken(f"{self.name}: chain {move.chain} is not at {move.from_} any more")

    async def _run_of(
        self, connection: AsyncConnection, chain: int, position: int, max_rows: int, before: int | None
    ) -> tuple[list[Entry], int]:
        """Rows of one chain, from the one behind ``position`` to the first gap, and the last place read then."""
        columns = store.ledger.c
        if self._until is not None:
            max_rows = min(max_rows, self._until - position)
        query = (
            sa.select(store.ledger)
            .where(columns.chain == chain, columns.position > position, columns.position <= position + max_rows)
            .order_by(columns.position)
        )
        run: list[Entry] = []
        last, repeats = position, None
        for row in await connection.execute(query):
            entry = Entry(*row)
            if entry.position != last + 1:
                if repeats is None:
                    repeats = await _repeats(connection, chain, position, max_rows)
                while last + 1 in repeats:
                    last += 1
            if entry.position != last + 1 or (before is not None and entry.settled_at >= before):
                break
            run.append(entry)
            last = entry.position
        if last == position:  # a repeat may be all that came
            repeats = await _repeats(connection, chain, position, max_rows)
            while last + 1 in repeats:
                last += 1
        return run, last

    @contextlib.asynccontextmanager
    async def _alone_in_postgres(self) -> AsyncIterator[bool]:
        """The lock is the connection's: it ends with it, whatever becomes of this gateway."""
        name = {"space": LOCKS, "name": zlib.crc32(self.name.encode()) - (1 << 31)}
        async with self._rooms.engine.connect() as plain:
            connection = await plain.execution_options(isolation_level="AUTOCOMMIT")
            lock = sa.text("SELECT pg_try_advisory_lock(:space, :name)")
            is_alone = bool((await connection.execute(lock, name)).scalar_one())
            try:
                yield is_alone
            except asyncio.CancelledError:  # a server that is stalled would not answer, and nobody cancels twice
                await connection.invalidate()
                raise
            finally:
                if is_alone and not connection.invalidated:
                    try:
                        await connection.execute(sa.text("SELECT pg_advisory_unlock(:space, :name)"), name)
                    except (SQLAlchemyError, OSError):
                        await connection.invalidate()  # not to the pool, where it might keep the lock for ever

    @contextlib.contextmanager
    def _alone_in_the_directory(self) -> Any:
        path = self._rooms.data_dir / f"follow-{self.name.replace(':', '-')}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)


async def number_strays(rooms: Store) -> None:
    """Gives rows that belong to no chain a place after one another, some at a time, so that they can be followed like
    the others: rows from before there were chains, in the table or in a spool. Raises what the database raises."""
    columns = store.ledger.c
    is_stray = (columns.chain == NO_CHAIN) & (columns.position == 0)
    strays = sa.select(columns.request_id).where(is_stray).limit(MAX_STRAYS)
    async with rooms.engine.connect() as connection:
        if (await connection.execute(strays.limit(1))).first() is None:
            return
    async with rooms.engine.begin() as connection:
        # Taken first, in both databases: others who number wait here.
        if connection.dialect.name == "postgresql":
            await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock, 0)"), {"lock": LOCKS})
        else:
            await connection.execute(sa.update(store.ledger).where(sa.false()).values(position=0))
        last = sa.select(sa.func.max(columns.position)).where(columns.chain == NO_CHAIN)
        position = (await connection.execute(last)).scalar_one()
        request_ids = (await connection.execute(strays)).scalars().all()
        numbered = (
            sa.update(store.ledger)
            .where(columns.request_id == sa.bindparam("stray"))
            .values(
                position=sa.bindparam("place"),
                # One that a spool kept was settled when it was created, as far as anybody knows.
                settled_at=sa.case((columns.settled_at == 0, columns.created_at), else_=columns.settled_at),
            )
        )
        places = [{"stray": name, "place": position + number} for number, name in enumerate(request_ids, 1)]
        if places:
            await connection.execute(numbered, places)


async def gaps_of(connection: AsyncConnection, name: str) -> list[Move]:
    """Gaps that a follower has stepped over: from the last place that it knows to the last that it waits for."""
    columns = store.ledger_cursors.c
    query = sa.select(columns.follower, columns.chain, columns.position)
    rows = await connection.execute(query.where(columns.follower.startswith(f"{name}{WAITING}", autoescape=True)))
    gaps = [Move(chain, position, int(follower.rpartition(WAITING)[2])) for follower, chain, position in rows]
    return [gap for gap in gaps if gap.from_ < gap.to]


def _gaps(name: str) -> sa.Select[Any]:
    """(chain, the cursor's position, that of the next row) where nothing stands right behind the cursor, but later."""
    chains = sa.union_all(sa.select(store.ledger_chains.c.id), sa.select(sa.literal(NO_CHAIN))).subquery("chains")
    cursors, rows, places = store.ledger_cursors.c, store.ledger.c, store.ledger_repeats.c
    position = sa.func.coalesce(cursors.position, 0)
    later = sa.select(rows.position).where(rows.chain == chains.c.id, rows.position > position)
    repeat = sa.exists().where(places.chain == chains.c.id, places.position == position + 1)
    joined = chains.outerjoin(store.ledger_cursors, (cursors.follower == name) & (cursors.chain == chains.c.id))
    following = later.order_by(rows.position).limit(1).scalar_subquery().label("following")
    found = sa.select(chains.c.id, position.label("position"), following).select_from(joined).where(~repeat).subquery()
    return sa.select(found).where(found.c.following > found.c.position + 1)


@functools.lru_cache(256)
def _chains_with_a_next_row(name: str, has_all_chains: bool) -> sa.Select[Any]:
    """(chain, the cursor's position) of those whose row behind the cursor is there. ``has_all_chains``: a chain without
    a cursor is one that was not begun, rather than none of its."""
    chains = sa.union_all(sa.select(store.ledger_chains.c.id), sa.select(sa.literal(NO_CHAIN))).subquery("chains")
    cursors, rows = store.ledger_cursors.c, store.ledger.c
    position = sa.func.coalesce(cursors.position, 0)
    # One look into the index for each chain, rather than a join that may read all of the ledger.
    behind = sa.select(rows.position).where(rows.chain == chains.c.id, rows.position == position + 1).limit(1)
    places = store.ledger_repeats.c
    repeat = sa.exists().where(places.chain == chains.c.id, places.position == position + 1)
    is_own = (cursors.follower == name) & (cursors.chain == chains.c.id)
    joined = chains.join(store.ledger_cursors, is_own, isouter=has_all_chains)
    has_next = behind.scalar_subquery().is_not(None) | repeat
    return sa.select(chains.c.id, position).select_from(joined).where(has_next).order_by(chains.c.id)


async def _repeats(connection: AsyncConnection, chain: int, position: int, max_rows: int) -> set[int]:
    """Places behind ``position`` without a row of their own."""
    columns = store.ledger_repeats.c
    query = sa.select(columns.position).where(
        columns.chain == chain, columns.position > position, columns.position <= position + max_rows
    )
    return set((await connection.execute(query)).scalars())
