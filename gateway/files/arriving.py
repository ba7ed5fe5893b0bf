"""Files while they are being written: how many at once, of each tenant and of all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from gateway import errors
from gateway.places import Places
from gateway.store import new_id
from policies import settings

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Read or written at once."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EROFS, errno.EIO, errno.ESTALE)
"""As a disk that has failed, or a share that is away."""


class Staged:
    """A file that is being written; nobody knows it yet."""

    def __init__(self, path: Path, writing: IO[bytes]) -> None:
        self.path = path
        self.num_bytes = 0
        self._writing = writing
        self._digest = hashlib.sha256()

    async def write(self, data: bytes) -> None:
        """Raises OSError; on a thread, since a disk may take its time."""
        await asyncio.to_thread(self._write, data)

    async def append(self, path: Path, also: Callable[[bytes], None]) -> None:
        """All of another file; ``also`` is given it, too, on the same thread. Raises OSError."""
        await asyncio.to_thread(self._append, path, also)

    async def finish(self) -> str:
        """All of it is on the disk: its SHA-256. Raises OSError."""
        await asyncio.to_thread(self._sync)
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._writing.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def _append(self, path: Path, also: Callable[[bytes], None]) -> None:
        with path.open("rb") as other:
            while data := other.read(PIECE_BYTES):
                also(data)
                self._write(data)

    def _sync(self) -> None:
        self._writing.flush()
        os.fsync(self._writing.fileno())


class Arriving:
    """All of them."""

    def __init__(self, config: settings.Files) -> None:
        self.places = Places(
            config.max_arriving,
            config.max_arriving_per_tenant,
            "Too many files are being uploaded. Please try again.",
            "This project is uploading {} files or parts already; wait for one to end.",
            retry_after_s=1.0,
        )

    @contextlib.asynccontextmanager
    async def staged(self, tenant_id: str | None, place: Path) -> AsyncIterator[Staged]:
        """A new file to be written in ``place``; nothing is left of it that was not put elsewhere. ``tenant_id``: whose
        client waits for it; None: nobody's, and it may always be. Raises ServiceUnavailable, RequestsLimited when the
        tenant has its share, StorageFull for what the disk has no room for, FilesUnavailable where it takes none."""
        with self.places.one(tenant_id) if tenant_id is not None else contextlib.nullcontext():
            path, is_open = place / new_id("arriving"), False
            try:
                with path.open("xb") as writing:
                    is_open = True
                    yield Staged(path, writing)
            except OSError as error:
                if error.errno in NO_SPACE:
                    log.error("files: %s takes no more: %s", place, error.strerror)
                    raise errors.StorageFull("This server has no room for the file at the moment.") from None
                if is_open and error.errno not in UNWRITABLE:
                    raise
                log.error("files: %s cannot be written: %s", place, error.strerror)
                what = "This server cannot write files at the moment. Please try again."
                raise errors.FilesUnavailable(what, retry_after_s=1.0) from None
            finally:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
