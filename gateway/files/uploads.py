"""Files that come in parts, in any order and several at a time, until their client says that all are there.

An upload is pending for an hour at most. Its parts lie beside the files, and have their rows, only so long: whatever
ends it takes the rows first and the bytes then. So what lies there for longer than an hour is nobody's, and swept up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import errors, openai, store
from gateway.background import alongside, to_its_end
from gateway.clock import Clock
from gateway.files import FORGOTTEN_S, File, Files, Staged, sweeping, unlink
from gateway.store import Store, new_id
from gateway.transactions import changing, reading

PENDING_S = 3600
"""From its beginning on."""

columns, parts = store.uploads.c, store.upload_parts.c


class TooManyUploads(errors.RateLimited):
    """The tenant has as many uploads that are pending as the settings allow."""

    code, should_retry = "upload_limit_exceeded", False


class TooManyParts(errors.RateLimited):
    """The tenant's uploads that are pending have as many parts as the settings allow."""

    code, should_retry = "part_limit_exceeded", False


class UploadOver(errors.InvalidRequest):
    """The upload is not pending any more."""

    def __init__(self, upload: Upload, status: openai.UploadStatus) -> None:
        super().__init__(f"The upload {upload.id} is {status} already", code=f"upload_{status}")
        self.upload = upload


class Upload(msgspec.Struct, frozen=True):
    """One row; the fields stand in the order of the table's columns. Of one that is pending, the time may be over."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    num_bytes: int
    file_expires_s: int | None
    status: openai.UploadStatus
    created_at: int
    expires_at: int
    file_id: str | None = None
    """What it became."""
    completion: bytes | None = None
    """By what was said to complete it, as a digest."""


assert Upload.__struct_fields__ == tuple(columns.keys())


class Part(msgspec.Struct, frozen=True):
    """As ``Upload``."""

    id: str
    upload_id: str
    num_bytes: int
    created_at: int


assert Part.__struct_fields__ == tuple(parts.keys())


class Uploads:
    """All that are on their way, and for a day those that were. What is asked of the store raises StoreUnavailable."""

    def __init__(self, rooms: Store, files: Files, clock: Clock) -> None:
        self._rooms = rooms
        self._files = files
        self._clock = clock
        self._completing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By tenant and id, while somebody holds one or waits for it."""

    async def create(self, tenant_id: str, asked: openai.UploadRequest) -> Upload:
        """Raises BodyTooLarge and QuotaExceeded for what it is to be, and TooManyUploads."""
        async with self._files.quota(tenant_id) as check:
            check(asked.bytes)
        now, most = int(self._files.wall()), self._files.config.max_open_uploads
        expires_s = self._files.expires_s(asked)
        upload = Upload(
            new_id("upload"),
            tenant_id,
            asked.filename,
            asked.purpose,
            asked.bytes,
            expires_s,
            "pending",
            now,
            now + PENDING_S,
        )
        is_open = sa.and_(columns.tenant_id == tenant_id, columns.status == "pending", columns.expires_at > now)
        async with changing(self._rooms) as connection:
            await self._files.take_room(connection, tenant_id, 0)  # one after another
            if (await connection.execute(sa.select(sa.func.count()).where(is_open))).scalar_one() >= most:
                raise TooManyUploads(
                    f"This project has {most} uploads that are pending. Complete one, or cancel one.", headers={}
                )
            await connection.execute(sa.insert(store.uploads), msgspec.structs.asdict(upload))
        return upload

    async def pending(self, tenant_id: str, upload_id: str) -> Upload:
        """The upload. Raises ObjectNotFound, also for what is another tenant's, and UploadOver, as do all below."""
        async with reading(self._rooms) as connection:
            return await self._pending(connection, tenant_id, upload_id)

    async def add(self, tenant_id: str, upload_id: str, staged: Staged) -> Part:
        """A part, which was written in ``Files.parts``. Raises InvalidRequest, TooManyParts and
        QuotaExceeded."""
        await staged.finish()
        part = Part(new_id("part"), upload_id, staged.num_bytes, int(self._files.wall()))
        if not part.num_bytes:
            raise errors.InvalidRequest("A part has at least one byte", param="data", code="empty_part")
        of_upload = sa.select(sa.func.count()).where(parts.upload_id == upload_id)
        now, most = int(self._files.wall()), self._files.config.max_open_parts
        is_open = sa.and_(columns.id == parts.upload_id, columns.tenant_id == tenant_id, columns.expires_at > now)
        of_tenant = sa.select(sa.func.count(parts.id)).where(is_open)

        async def noted(connection: AsyncConnection) -> Part:
            await self._pending(connection, tenant_id, upload_id)
            if (await connection.execute(of_upload)).scalar_one() >= openai.MAX_PARTS:
                raise errors.InvalidRequest(f"An upload has at most {openai.MAX_PARTS} parts", code="too_many_parts")
            await self._files.take_room(connection, tenant_id, part.num_bytes)
            if (await connection.execute(of_tenant)).scalar_one() >= most:
                raise TooManyParts(
                    f"The uploads of this project that are pending have {most} parts together. Send larger ones, or "
                    "complete or cancel an upload.",
                    headers={},
                )
            await connection.execute(sa.insert(store.upload_parts), msgspec.structs.asdict(part))
            return part

        return await self._files.placed(staged, self._path(part.id), noted)

    async def complete(self, tenant_id: str, upload_id: str, asked: openai.UploadCompletion) -> tuple[Upload, File]:
        """The file that its parts make; the same one again for a client that says the same again, as one does that
        did not hear the answer. Raises InvalidRequest where they are not what they were to be."""
        said = _digest(asked)
        try:
            # One at a time, as each has a copy of all parts on the disk.
            async with self._completing.setdefault((tenant_id, upload_id), asyncio.Lock()):
                return await self._complete(tenant_id, upload_id, asked, said)
        except UploadOver as over:
            upload = over.upload
            if upload.file_id is None or upload.completion != said:
                raise
            try:
                return upload, await self._files.find(tenant_id, upload.file_id)
            except errors.ObjectNotFound:  # it has been deleted since
                raise over from None

    async def _complete(
        self, tenant_id: str, upload_id: str, asked: openai.UploadCompletion, said: bytes
    ) -> tuple[Upload, File]:
        query = sa.select(parts.id, parts.num_bytes).where(parts.upload_id == upload_id)
        async with reading(self._rooms) as connection:
            upload = await self._pending(connection, tenant_id, upload_id)
            sizes = {row.id: row.num_bytes for row in await connection.execute(query)}
        _check(asked.part_ids, sizes, upload.num_bytes)
        async with self._files.staged(tenant_id) as staged:
            md5 = hashlib.md5(usedforsecurity=False)
            try:
                for part_id in asked.part_ids:
                    await staged.append(self._path(part_id), md5.update)
            except FileNotFoundError:
                await self.pending(tenant_id, upload_id)  # it may be over by now, and says so
                raise
            if asked.md5 is not None and asked.md5.lower() != md5.hexdigest():
                raise errors.InvalidRequest(
                    f"The parts, in this order, have the MD5 {md5.hexdigest()}", param="md5", code="md5_mismatch"
                )
            sha256, name, expires_s = await staged.finish(), upload.filename, upload.file_expires_s
            file = self._files.row_of(staged, sha256, tenant_id, name, upload.purpose, expires_s)

            async def noted(connection: AsyncConnection) -> tuple[Upload, list[str]]:
                became = {"file_id": file.id, "completion": said}
                ended = await self._end(connection, tenant_id, upload_id, "completed", **became)
                await self._files.note(connection, file)
                return ended

            upload = await to_its_end(self._rid_of(self._files.placed(staged, self._files.path(file.id), noted)))
        return upload, file

    async def cancel(self, tenant_id: str, upload_id: str) -> Upload:
        return await to_its_end(self._rid_of(self._cancelled(tenant_id, upload_id)))

    async def _cancelled(self, tenant_id: str, upload_id: str) -> tuple[Upload, list[str]]:
        async with changing(self._rooms) as connection:
            return await self._end(connection, tenant_id, upload_id, "cancelled")

    async def _rid_of(self, ending: Coroutine[Any, Any, tuple[Upload, list[str]]]) -> Upload:
        """The upload that has ended, as ``_end`` says, without the bytes of its parts."""
        upload, gone = await ending
        await asyncio.to_thread(self._unlink, gone)
        return upload

    # Sweeping

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, uploads go when their time is over."""
        async with alongside(sweeping(self.sweep, self._clock)):
            yield

    async def sweep(self) -> None:
        """Deletes the parts of those whose time is over, what gateways left behind that were killed, and, after a day,
        that there was an upload."""
        now = int(self._files.wall())
        over = sa.select(columns.id).where(columns.expires_at <= now)
        async with changing(self._rooms) as connection:
            statement = sa.delete(store.upload_parts).where(parts.upload_id.in_(over)).returning(parts.id)
            gone = list((await connection.execute(statement)).scalars())
            await connection.execute(sa.delete(store.uploads).where(columns.expires_at <= now - FORGOTTEN_S))
        await asyncio.to_thread(self._unlink, gone)
        await asyncio.to_thread(self._unlink_older_than, now - PENDING_S)

    def _path(self, part_id: str) -> Path:
        """The id is one that a row has."""
        return self._files.parts / part_id

    def _unlink(self, part_ids: Iterable[str]) -> None:
        unlink(map(self._path, part_ids))

    def _unlink_older_than(self, at: float) -> None:
        for path in self._files.parts.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < at:
                    path.unlink()

    async def _pending(self, connection: AsyncConnection, tenant_id: str, upload_id: str) -> Upload:
        """As ``pending``. In a transaction that changes, it stays so until the end of that."""
        row = None
        if "\0" not in upload_id:  # for which PostgreSQL would not even look
            query = sa.select(store.uploads).where(columns.id == upload_id, columns.tenant_id == tenant_id)
            row = (await connection.execute(query.with_for_update())).first()
        if row is None:
            raise errors.ObjectNotFound(f"No such Upload object: {upload_id}", param="id")
        upload = Upload(*row)
        status = upload.status
        if status == "pending" and upload.expires_at <= int(self._files.wall()):
            status = "expired"
        if status != "pending":
            raise UploadOver(upload, status)
        return upload

    async def _end(
        self,
        connection: AsyncConnection,
        tenant_id: str,
        upload_id: str,
        status: openai.UploadStatus,
        **became: Any,
    ) -> tuple[Upload, list[str]]:
        """The upload afterwards, and the parts whose bytes are nobody's then. ``became``: further columns."""
        upload = await self._pending(connection, tenant_id, upload_id)
        changed = sa.update(store.uploads).where(columns.id == upload_id)
        await connection.execute(changed.values(status=status, **became))
        statement = sa.delete(store.upload_parts).where(parts.upload_id == upload_id).returning(parts.id)
        gone = list((await connection.execute(statement)).scalars())
        return msgspec.structs.replace(upload, status=status, **became), gone


def _digest(asked: openai.UploadCompletion) -> bytes:
    """Of what makes one completion unlike another."""
    said = asked.part_ids, None if asked.md5 is None else asked.md5.lower()
    return hashlib.sha256(msgspec.json.encode(said)).digest()


def _check(part_ids: Sequence[str], sizes: Mapping[str, int], num_bytes: int) -> None:
    """Raises InvalidRequest where these parts are no file of so many bytes. ``sizes``: of all that there are."""
    unused = dict(sizes)
    for place, part_id in enumerate(part_ids):
        if unused.pop(part_id, None) is None:
            wrong = "it is there twice" if part_id in sizes else "it is no part of this upload"
            path = f"part_ids[{place}]"
            raise errors.InvalidRequest(f"Invalid '{path}': {wrong}.", param=path, code="invalid_part")
    if (found := sum(sizes[part_id] for part_id in part_ids)) != num_bytes:
        raise errors.InvalidRequest(
            f"Invalid 'part_ids': they have {found} bytes together, and the upload is of {num_bytes}.",
            param="part_ids",
            code="bytes_mismatch",
        )
