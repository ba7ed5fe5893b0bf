"""What the store knows of batches: whose they are, how far they have come, and which gateway works on them.

A batch has one owner. It says again and again that it lives, and with the same statement how far it has come; when it
has not for ``batches.lease_s``, another gateway may take the batch over. SQLite has one gateway, which takes whatever
it finds.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import sqlalchemy as sa

from gateway import errors, openai, store
from gateway.files import OVER, File, Files
from gateway.store import Store, new_id
from gateway.transactions import changing, edition_of, reading
from policies import settings

WINDOW_S = {"24h": 86_400}
_ID = re.compile("batch_[0-9a-f]{24}")

columns = store.batches.c


class Counts(msgspec.Struct, frozen=True):
    """Of a batch's lines, and the tokens of those that were answered; fields as the table's columns."""

    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0


class Batch(msgspec.Struct, frozen=True):
    """One row; the fields stand in the order of the table's columns."""

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None
    output_expires_s: int | None
    model: str | None
    status: openai.BatchStatus
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    owner: str | None = None
    leased_until: int | None = None


assert Batch.__struct_fields__ == tuple(columns.keys())


class Lost(Exception):
    """The batch is another gateway's by now, or gone."""


class Book:
    """All batches. What is asked of the store raises StoreUnavailable while that is away."""

    def __init__(
        self,
        rooms: Store,
        config: settings.Batches,
        files: Files,
        owner: str,
        endpoints: Collection[str] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``owner``: this gateway's name, unlike any other's. ``endpoints``: where lines may go. ``wall``: Unix
        seconds."""
        self.endpoints = endpoints
        self.config = config
        self.wall = wall
        self.changed = asyncio.Event()
        """There may be something to do, as a client of this gateway has said."""
        self.others_wait = False
        """When some were claimed last, there were more whose turn it was."""
        self._behind: dict[str, int] = {}
        """Those that made room for others, in the order in which they did."""
        self._num_behind = 0
        self._rooms = rooms
        self._files = files
        self._owner = owner
        self._looked: object = None
        """What was asked for last, and the store before it was."""
        self._due_at = 0.0
        """When a lease of another gateway is over next."""

    # For clients

    async def create(self, tenant_id: str, key_id: str, asked: openai.BatchRequest) -> Batch:
        """Raises ObjectNotFound and InvalidRequest for its file, and TooManyBatches."""
        file = await self._files.find(tenant_id, asked.input_file_id, "input_file_id")
        most = self.config.max_input_bytes
        if file.purpose != "batch":
            raise errors.InvalidRequest(
                f"The file {file.id} was uploaded for '{file.purpose}', and a batch's has the purpose 'batch'",
                param="input_file_id",
                code="invalid_file_purpose",
            )
        if file.num_bytes > most:
            raise errors.InvalidRequest(
                f"The file {file.id} has {file.num_bytes} bytes, and a batch's may have {most}",
                param="input_file_id",
                code="file_too_large",
            )
        now = int(self.wall())
        batch = Batch(
            id=new_id("batch"),
            tenant_id=tenant_id,
            key_id=key_id,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            metadata=msgspec.json.encode(asked.metadata).decode() if asked.metadata is not None else None,
            output_expires_s=asked.output_expires_after.seconds if asked.output_expires_after is not None else None,
            model=None,
            status="validating",
            errors=None,
            output_file_id=None,
            error_file_id=None,
            created_at=now,
            expires_at=now + WINDOW_S[asked.completion_window],
        )
        open_ones = sa.select(sa.func.count()).where(columns.tenant_id == tenant_id, columns.status.not_in(OVER))
        async with changing(self._rooms) as connection:
            await self._files.take_turn(connection, tenant_id)
            if (await connection.execute(open_ones)).scalar_one() >= self.config.max_open:
                raise errors.TooManyBatches(
                    f"This project has {self.config.max_open} batches that are not over. Wait until one is, or cancel "
                    "one.",
                    headers={},
                )
            await connection.execute(sa.insert(store.batches), msgspec.structs.asdict(batch))
        self.changed.set()
        return batch

    async def find(self, tenant_id: str, batch_id: str) -> Batch:
        """Raises ObjectNotFound, also for what is another tenant's."""
        query = sa.select(store.batches).where(columns.id == batch_id, columns.tenant_id == tenant_id)
        row = None
        if "\0" not in batch_id:  # for which PostgreSQL would not even look
            async with reading(self._rooms) as connection:
                row = (await connection.execute(query)).first()
        if row is None:
            raise errors.ObjectNotFound(f"No batch found with id '{batch_id}'.", param="id")
        return Batch(*row)

    async def page(self, tenant_id: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """So many of a tenant's batches, the newest first, and whether there are more. Raises InvalidRequest."""
        if after is not None and _ID.fullmatch(after) is None:
            raise errors.InvalidRequest(f"No batch found with id '{after}'.", param="after")
        query = sa.select(store.batches).where(columns.tenant_id == tenant_id)
        if after is not None:
            query = query.where(columns.id < after)
        async with reading(self._rooms) as connection:
            rows = await connection.execute(query.order_by(columns.id.desc()).limit(limit + 1))
            found = [Batch(*row) for row in rows]
        return found[:limit], len(found) > limit

    async def cancel(self, tenant_id: str, batch_id: str) -> Batch:
        """Raises ObjectNotFound, and InvalidRequest where it is too late."""
        batch = await self.find(tenant_id, batch_id)
        if batch.status not in ("cancelling", "cancelled"):
            now = int(self.wall())
            begun = columns.status.in_(("validating", "in_progress"))
            statement = sa.update(store.batches).where(columns.id == batch_id, begun)
            async with changing(self._rooms) as connection:
                await connection.execute(statement.values(status="cancelling", cancelling_at=now))
            batch = await self.find(tenant_id, batch_id)
        if batch.status not in ("cancelling", "cancelled"):
            raise errors.InvalidRequest(
                f"Cannot cancel a batch with status '{batch.status}'.", code="batch_not_cancellable"
            )
        self.changed.set()
        return batch

    # For its owner

    async def claim(self, running: Collection[Batch], limit: int, most_of_one: int) -> list[Batch]:
        """So many batches at most that are this gateway's from now on: those that nobody has, and those of its own that
        are not ``running``. Tenants take turns, the oldest of each first, and none has more than ``most_of_one``; but
        one that was cancelled is over at once, and waits for no turn."""
        now, running_ids = int(self.wall()), {batch.id for batch in running}
        looked = await edition_of(self._rooms), running_ids, limit, most_of_one
        if looked == self._looked and now < self._due_at:  # whoever takes one changes the store, so there was none
            return []
        free: sa.ColumnElement[bool] = sa.true()
        if self._rooms.database is None:
            free = sa.or_(columns.owner.is_(None), columns.leased_until < now, columns.owner == self._owner)
        is_running = columns.id.in_(running_ids)
        place = sa.func.row_number().over(partition_by=columns.tenant_id, order_by=columns.id).label("place")
        waiting = sa.select(columns.id, columns.tenant_id, columns.status, place)
        waiting = waiting.where(columns.status.not_in(OVER), free, sa.not_(is_running))
        first = waiting.subquery()
        query = sa.select(first).where(sa.or_(first.c.place <= most_of_one, first.c.status == "cancelling"))
        soonest = sa.select(sa.func.min(columns.leased_until)).where(columns.status.not_in(OVER), sa.not_(free))
        async with reading(self._rooms) as connection:
            found = (await connection.execute(query)).all()
            until = (await connection.execute(soonest)).scalar() if self._rooms.database is None else None
        taken = Counter(batch.tenant_id for batch in running)
        known = running_ids | {row.id for row in found}
        self._behind = {batch_id: place for batch_id, place in self._behind.items() if batch_id in known}
        turns = [
            (0 if row.status == "cancelling" else taken[row.tenant_id] + row.place, self._behind.get(row.id, 0), row.id)
            for row in found
        ]
        ids = [batch_id for turn, _, batch_id in sorted(turns) if turn <= most_of_one]
        self.others_wait = len(ids) > limit
        claimed = []
        for batch_id in ids[:limit]:
            statement = sa.update(store.batches).where(columns.id == batch_id, columns.status.not_in(OVER), free)
            statement = statement.values(owner=self._owner, leased_until=self._until()).returning(store.batches)
            async with changing(self._rooms) as connection:
                row = (await connection.execute(statement)).first()
            if row is not None:
                claimed.append(Batch(*row))
                self._behind.pop(batch_id, None)
        self._looked, self._due_at = looked, math.inf if until is None else until + 1
        return claimed

    def make_room(self, batch_id: str) -> None:
        """Others whose turn it is as much go before it, until it is claimed again."""
        self._num_behind += 1
        self._behind[batch_id] = self._num_behind

    async def key_hash(self, key_id: str) -> bytes | None:
        """Of the key, as the directory knows it; None where there is none of this id."""
        query = sa.select(store.keys.c.hash).where(store.keys.c.id == key_id)
        async with reading(self._rooms) as connection:
            found: bytes | None = (await connection.execute(query)).scalar()
        return found

    async def has_input(self, batch: Batch) -> bool:
        """Its file is there. One whose time is over meanwhile stays as long as a batch reads it."""
        query = sa.select(store.files.c.id).where(store.files.c.id == batch.input_file_id)
        async with reading(self._rooms) as connection:
            return (await connection.execute(query)).first() is not None

    async def note(self, batch_id: str, **values: Any) -> Batch:
        """Says that its owner lives, and what has become of it: the row as it is then, of which others may have changed
        the status. Raises Lost."""
        statement = sa.update(store.batches).where(columns.id == batch_id, columns.owner == self._owner)
        statement = statement.values(leased_until=self._until(), **values).returning(store.batches)
        async with changing(self._rooms) as connection:
            row = (await connection.execute(statement)).first()
        if row is None:
            raise Lost(batch_id)
        return Batch(*row)

    async def look(self, batch_id: str) -> Batch:
        """The row as it is, which somebody may have cancelled. Raises Lost."""
        query = sa.select(store.batches).where(columns.id == batch_id, columns.owner == self._owner)
        async with reading(self._rooms) as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            raise Lost(batch_id)
        return Batch(*row)

    async def begin(self, batch_id: str, **values: Any) -> Batch:
        """As ``note``, for one whose lines were found to be good; unless it was cancelled meanwhile it is in
        progress."""
        status = sa.case((columns.status == "validating", "in_progress"), else_=columns.status)
        return await self.note(batch_id, status=status, in_progress_at=int(self.wall()), **values)

    async def finalize(self, batch_id: str, now: int) -> Batch:
        """As ``note``, for one that asks no more lines: unless it was cancelled it is finalizing."""
        is_cancelled = columns.status == "cancelling"
        status = sa.case((is_cancelled, columns.status), else_="finalizing")
        at = sa.case((is_cancelled, None), else_=sa.func.coalesce(columns.finalizing_at, now))
        return await self.note(batch_id, status=status, finalizing_at=at)

    async def fail(self, batch_id: str, **values: Any) -> Batch:
        """As ``finish``, for one that has written nothing: unless it was cancelled, also a moment ago, it has
        failed."""
        is_cancelled, now = columns.status == "cancelling", sa.literal(int(self.wall()), sa.BigInteger)
        values["status"] = sa.case((is_cancelled, "cancelled"), else_="failed")
        values["cancelled_at"] = sa.case((is_cancelled, now), else_=None)
        values["failed_at"] = sa.case((is_cancelled, None), else_=now)
        return await self.finish(batch_id, [], **values)

    async def finish(self, batch_id: str, files: list[File], **values: Any) -> Batch:
        """It is over, and what it has written is its tenant's from the same moment on. Raises Lost."""
        statement = sa.update(store.batches).where(columns.id == batch_id, columns.owner == self._owner)
        statement = statement.values(owner=None, leased_until=None, **values).returning(store.batches)
        async with changing(self._rooms) as connection:
            row = (await connection.execute(statement)).first()
            if row is None:
                raise Lost(batch_id)
            for file in files:
                await self._files.note(connection, file)
        return Batch(*row)

    async def release(self, batch_id: str | None = None) -> None:
        """Whoever wants it may have it; None: all that are this gateway's."""
        statement = sa.update(store.batches).where(columns.owner == self._owner)
        if batch_id is not None:
            statement = statement.where(columns.id == batch_id)
        async with changing(self._rooms) as connection:
            await connection.execute(statement.values(owner=None, leased_until=None))

    def _until(self) -> int:
        return int(self.wall() + self.config.lease_s)
