"""Files of tenants: their bytes in one directory, each under its id, and a row in the store for each.

A file is written beside the others until it is whole and on the disk, and has its row only then; deleting begins with
the row. So whatever a row names can be read, and what has no row is nobody's and swept up after a day. Gateways that
share a PostgreSQL share the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import errors, openai, store
from gateway.background import alongside, to_its_end
from gateway.clock import Clock
from gateway.files.arriving import PIECE_BYTES, Arriving, Staged
from gateway.store import Store, new_id
from gateway.transactions import changing, reading
from policies import settings

__all__ = ["PIECE_BYTES", "File", "Files", "Staged", "sweeping", "unlink"]

log = logging.getLogger(__name__)

SWEEP_S = 60.0
"""Between two looks for files whose time is over."""
FORGOTTEN_S = 86_400.0
"""After so long an upload that was never finished is nobody's, and neither is a file without a row."""
ORPHANS_S = 3600.0
"""Between two looks for those, at all that is in the directory."""
MAX_ASKED = 500
"""Ids in one statement."""
MAX_PART_BYTES = 64 << 20
"""Of a file that comes in parts (``uploads``), one of them."""
DAMAGED = "internal_error"
"""What a batch failed by whose journal could not be read."""
OVER = ("completed", "failed", "expired", "cancelled")
"""Statuses of batches that need their input no more."""
_ID = re.compile("file-[0-9a-f]{24}")
T = TypeVar("T")


class File(msgspec.Struct, frozen=True):
    """One row; the fields stand in the order of the table's columns."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    num_bytes: int
    sha256: str
    created_at: int
    expires_at: int | None


assert File.__struct_fields__ == tuple(store.files.c.keys())


class Files:
    """All that tenants have uploaded, and what batches have written for them."""

    def __init__(
        self,
        rooms: Store,
        config: settings.Files,
        clock: Clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``wall``: Unix seconds. Raises StoreError when the directory cannot be written."""
        self.config = config
        self.directory = Path(config.directory) if config.directory else rooms.data_dir / "files"
        self.parts = self.directory / "parts"
        """Of files that come in parts (``uploads``)."""
        self.arriving = Arriving(config)
        self.wall = wall
        self._rooms = rooms
        self._clock = clock
        self._num_pending_bytes: dict[str, int] = {}
        """By tenant: bytes of uploads that have no row yet."""
        self._looked_at = -math.inf
        """For files without a row."""
        try:
            for place in (self.directory, self._staging, self.parts):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise store.StoreError(f"files.directory {self.directory} cannot be written: {error.strerror}") from None

    def expires_s(self, terms: openai.FileTerms) -> int | None:
        """How long it is kept; None: until it is deleted."""
        if terms.expires_after is not None:
            return terms.expires_after.seconds
        return self.config.batch_expires_s if terms.purpose == "batch" else None

    @property
    def _staging(self) -> Path:
        return self.directory / "arriving"

    def path(self, file_id: str) -> Path:
        """Where its bytes are. The id is one that a row has."""
        return self.directory / file_id

    # One by one

    async def find(self, tenant_id: str, file_id: str, param: str = "id") -> File:
        """``param``: where it was named. Raises ObjectNotFound, also for what is another tenant's, and
        StoreUnavailable, as all of these do."""
        async with reading(self._rooms) as connection:
            found = await self._find(connection, tenant_id, file_id)
        if found is None:
            raise errors.ObjectNotFound(f"No such File object: {file_id}", param=param)
        return found

    async def page(
        self, tenant_id: str, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> tuple[list[File], bool]:
        """So many of a tenant's files, and whether there are more. ``after`` may be gone by now: ids are in the order
        of making. Raises InvalidRequest for what is no id."""
        if after is not None and _ID.fullmatch(after) is None:
            raise errors.InvalidRequest(f"No such File object: {after}", param="after")
        columns = store.files.c
        query = sa.select(store.files).where(columns.tenant_id == tenant_id, self._is_there())
        if purpose is not None:
            query = query.where(columns.purpose == purpose)
        if after is not None:
            query = query.where(columns.id < after if newest_first else columns.id > after)
        query = query.order_by(columns.id.desc() if newest_first else columns.id).limit(limit + 1)
        async with reading(self._rooms) as connection:
            found = [File(*row) for row in await connection.execute(query)]
        return found[:limit], len(found) > limit

    async def delete(self, tenant_id: str, file_id: str) -> None:
        """Raises ObjectNotFound, and InUse while a batch that is not over reads it."""
        batches = store.batches.c
        reads = sa.select(batches.id).where(batches.input_file_id == file_id, batches.status.not_in(OVER)).limit(1)
        async with changing(self._rooms) as connection:
            if await self._find(connection, tenant_id, file_id) is None:
                raise errors.ObjectNotFound(f"No such File object: {file_id}", param="id")
            if (batch_id := (await connection.execute(reads)).scalar()) is not None:
                raise errors.InUse(f"The file {file_id} is being read by the batch {batch_id}; cancel that first.")
            await connection.execute(sa.delete(store.files).where(store.files.c.id == file_id))
        await asyncio.to_thread(unlink, [self.path(file_id)])

    # Making

    def staged(self, tenant_id: str | None, place: Path | None = None) -> AbstractAsyncContextManager[Staged]:
        """A new file to be written, in ``place`` or where files arrive, as ``Arriving.staged`` has it."""
        return self.arriving.staged(tenant_id, place or self._staging)

    @contextlib.asynccontextmanager
    async def quota(
        self, tenant_id: str, what: Literal["file", "part"] = "file"
    ) -> AsyncIterator[Callable[[int], None]]:
        """``check(num_bytes)`` says that an upload has come so far. It raises BodyTooLarge and QuotaExceeded, early;
        ``take_room`` has the last word."""
        async with reading(self._rooms) as connection:
            (used, _), come = await self._held_by(connection, tenant_id), 0
        most = self.config.max_tenant_bytes
        most_of_one = self.config.max_file_bytes if what == "file" else MAX_PART_BYTES

        def check(num_bytes: int) -> None:
            nonlocal come
            self._num_pending_bytes[tenant_id] = self._num_pending_bytes.get(tenant_id, 0) + num_bytes - come
            come = num_bytes
            if num_bytes > most_of_one:
                raise errors.BodyTooLarge(f"The {what} is too large: this server takes at most {most_of_one} bytes")
            if used + self._num_pending_bytes[tenant_id] > most:
                raise self._too_much()

        try:
            yield check
        finally:
            left = self._num_pending_bytes.get(tenant_id, 0) - come
            if left > 0:
                self._num_pending_bytes[tenant_id] = left
            else:
                self._num_pending_bytes.pop(tenant_id, None)

    async def take_turn(self, connection: AsyncConnection, tenant_id: str) -> None:
        """Others of the tenant's that take theirs wait for the end of this transaction, at whichever gateway."""
        mine = sa.select(store.tenants.c.id).where(store.tenants.c.id == tenant_id)
        await connection.execute(mine.with_for_update(key_share=True))

    async def take_room(self, connection: AsyncConnection, tenant_id: str, num_bytes: int) -> None:
        """For so many more, which this transaction notes, when it is its turn. Raises QuotaExceeded."""
        await self.take_turn(connection, tenant_id)
        num_held, num_files = await self._held_by(connection, tenant_id)
        if num_held + num_bytes > self.config.max_tenant_bytes:
            raise self._too_much()
        if num_files >= self.config.max_tenant_files:
            raise errors.QuotaExceeded(f"This project has {num_files} files, which is as many as it may have.")

    async def _held_by(self, connection: AsyncConnection, tenant_id: str) -> tuple[int, int]:
        """Bytes of all the tenant's files, and of the parts of those that are still coming; and how many files."""
        whole, parts, uploads = store.files.c, store.upload_parts.c, store.uploads.c
        is_coming = sa.and_(uploads.id == parts.upload_id, uploads.tenant_id == tenant_id)
        kept = sa.select(sa.func.sum(whole.num_bytes), sa.func.count(whole.id))
        coming = sa.select(sa.func.sum(parts.num_bytes)).where(is_coming, uploads.expires_at > int(self.wall()))
        kept = kept.where(whole.tenant_id == tenant_id, self._is_there())
        num_kept, num_files = (await connection.execute(kept)).one()
        num_coming = (await connection.execute(coming)).scalar_one()
        return int(num_kept or 0) + int(num_coming or 0), num_files

    def _too_much(self) -> errors.QuotaExceeded:
        return errors.QuotaExceeded(
            f"The files of this project may have {self.config.max_tenant_bytes} bytes together, and with this one they "
            "would have more. Delete some first.",
        )

    async def keep(
        self, staged: Staged, tenant_id: str, filename: str, purpose: str, expires_s: int | None = None
    ) -> File:
        """From now on it is a file of the tenant's. Raises QuotaExceeded."""
        file = self.row_of(staged, await staged.finish(), tenant_id, filename, purpose, expires_s)

        async def noted(connection: AsyncConnection) -> File:
            await self.take_room(connection, tenant_id, file.num_bytes)
            await self.note(connection, file)
            return file

        return await self.placed(staged, self.path(file.id), noted)

    async def placed(
        self, staged: Staged, target: Path, noted: Callable[[AsyncConnection], Coroutine[Any, Any, T]]
    ) -> T:
        """What ``noted`` returns, which says in a transaction whose it is. It lies there when that is done, and nowhere
        when it is not; where nobody knows, it is left to be swept up."""
        return await to_its_end(self._placed(staged, target, noted))

    async def _placed(
        self, staged: Staged, target: Path, noted: Callable[[AsyncConnection], Coroutine[Any, Any, T]]
    ) -> T:
        await asyncio.to_thread(_move, staged.path, target)
        try:
            async with changing(self._rooms) as connection:
                return await noted(connection)
        except errors.StoreUnavailable:  # it may have been committed all the same
            raise
        except Exception:
            with contextlib.suppress(OSError):
                os.unlink(target)
            raise

    def row_of(
        self, staged: Staged, sha256: str, tenant_id: str, filename: str, purpose: str, expires_s: int | None
    ) -> File:
        """What will be known of it."""
        now, id = int(self.wall()), new_id("file").replace("_", "-", 1)
        expires_at = None if expires_s is None else now + expires_s
        return File(id, tenant_id, filename, purpose, staged.num_bytes, sha256, now, expires_at)

    async def place(self, staged: Staged, file: File) -> None:
        """Under its id, durably; without a row it is nobody's yet. Raises OSError."""
        await asyncio.to_thread(_move, staged.path, self.path(file.id))

    async def note(self, connection: AsyncConnection, file: File) -> None:
        """Its row, in a transaction of somebody else's."""
        await connection.execute(sa.insert(store.files), msgspec.structs.asdict(file))

    # Sweeping

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, files go when their time is over."""
        async with alongside(sweeping(self.sweep, self._clock)):
            yield

    async def sweep(self) -> None:
        """Deletes what has expired, and what was left behind by uploads that never ended and by gateways that were
        killed between a file and its row."""
        columns, now = store.files.c, int(self.wall())
        async with changing(self._rooms) as connection:
            needed = sa.select(store.batches.c.input_file_id).where(store.batches.c.status.not_in(OVER))
            over = sa.delete(store.files).where(columns.expires_at <= now, columns.id.not_in(needed))
            gone = list((await connection.execute(over.returning(columns.id))).scalars())
        await asyncio.to_thread(self._unlink, gone, now)
        if self._clock.now() >= self._looked_at + ORPHANS_S:
            self._looked_at = self._clock.now()
            await self._sweep_orphans(now)
            await self._sweep_journals(now)

    async def _sweep_orphans(self, now: int) -> None:
        old = await asyncio.to_thread(self._older_than, now - FORGOTTEN_S, "file-*")
        for start in range(0, len(old), MAX_ASKED):
            asked = old[start : start + MAX_ASKED]
            async with reading(self._rooms) as connection:
                query = sa.select(store.files.c.id).where(store.files.c.id.in_(asked))
                known = set((await connection.execute(query)).scalars())
            if orphans := [file_id for file_id in asked if file_id not in known]:
                log.warning("files: %d of %s are nobody's, and deleted", len(orphans), self.directory)
                await asyncio.to_thread(self._unlink, orphans, now)

    async def _sweep_journals(self, now: int) -> None:
        """Those of batches that were over when their gateway was killed; one that is damaged has been left for whoever
        looks into it."""
        columns = store.batches.c
        is_damaged = sa.func.coalesce(columns.errors, "").contains(f'"code":"{DAMAGED}"', autoescape=True)
        old = await asyncio.to_thread(self._older_than, now - FORGOTTEN_S, "batch_*.journal")
        for start in range(0, len(old), MAX_ASKED):
            asked = [name.removesuffix(".journal") for name in old[start : start + MAX_ASKED]]
            async with reading(self._rooms) as connection:
                query = sa.select(columns.id).where(columns.id.in_(asked), columns.status.in_(OVER), ~is_damaged)
                over = (await connection.execute(query)).scalars().all()
            for batch_id in over:
                await asyncio.to_thread((self.directory / f"{batch_id}.journal").unlink, missing_ok=True)

    def _older_than(self, at: float, pattern: str) -> list[str]:
        """Names of files, whether or not they have a row."""
        old = []
        for path in self.directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < at:
                    old.append(path.name)
        return old

    def _unlink(self, file_ids: list[str], now: int) -> None:
        unlink(map(self.path, file_ids))
        for path in self._staging.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < now - FORGOTTEN_S:
                    path.unlink()

    def _is_there(self) -> sa.ColumnElement[bool]:
        columns = store.files.c
        return sa.or_(columns.expires_at.is_(None), columns.expires_at > int(self.wall()))

    async def _find(self, connection: AsyncConnection, tenant_id: str, file_id: str) -> File | None:
        if "\0" in file_id:  # for which PostgreSQL would not even look
            return None
        columns = store.files.c
        query = sa.select(store.files).where(columns.id == file_id, columns.tenant_id == tenant_id, self._is_there())
        row = (await connection.execute(query)).first()
        return None if row is None else File(*row)


def unlink(paths: Iterable[Path]) -> None:
    """Of what has no row any more, and is nobody's: what cannot be deleted now is swept up some day."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("files: %s is nobody's, and cannot be deleted: %s", path, error.strerror)


async def sweeping(sweep: Callable[[], Coroutine[Any, Any, None]], clock: Clock) -> None:
    """Again and again, whether or not it fails."""
    while True:
        try:
            await sweep()
        except (SQLAlchemyError, OSError, errors.GatewayError) as error:
            log.warning("files: cannot be swept now: %s", error)
        await clock.sleep(SWEEP_S)


def _move(source: Path, target: Path) -> None:
    source.rename(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
