"""The gateway's side of an export: a process that writes, and its bytes as they come."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import msgspec

from gateway.exports import Order
from gateway.launcher import environment
from policies import settings

COMMAND = (sys.executable, "-P", "-m", "gateway.exports")
CHUNK_BYTES = 1 << 18
MAX_AT_ONCE = 2
"""Exports of one gateway; more are refused."""


class Task(msgspec.Struct, frozen=True):
    """What the process is told."""

    store: settings.Store
    order: Order
    num_left_out: int = 0
    """Bytes at the beginning, for whoever has them already."""


class Busy(Exception):
    """As many as may be are being written."""


class Broken(Exception):
    """The process has not come to its end; what it said is in the log."""


class Exports:
    """Of one gateway."""

    def __init__(self) -> None:
        self._num_running = 0

    @contextlib.asynccontextmanager
    async def running(self, task: Task) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes, as fast as they are taken. Leaving it ends the process. Raises Busy, and the iterator raises
        Broken."""
        if self._num_running >= MAX_AT_ONCE:
            raise Busy
        self._num_running += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment()
            )
            try:
                assert process.stdin is not None
                process.stdin.write(msgspec.msgpack.encode(task))
                process.stdin.close()
                yield _bytes_of(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        finally:
            self._num_running -= 1


async def _bytes_of(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    while data := await process.stdout.read(CHUNK_BYTES):
        yield data
    if await process.wait():
        raise Broken(f"an export's process exited with {process.returncode}")
