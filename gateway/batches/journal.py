"""What has become of a batch's lines, on the disk before it counts.

A record is one line of JSON. It is appended and made durable together with others that come meanwhile; only then its
row goes to the ledger, with whose request id it is found again: a record whose row is missing after a crash has its row
written then, and a line without a record has none. One that is cut short at the end was never counted, and is cut off.

Whoever has a journal open holds a lock on it, which ends with its process: no two gateways work on one batch, whatever
they believe of each other's leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from gateway.background import to_its_end
from gateway.batches.book import Counts
from gateway.clock import Clock
from gateway.ledger import Entry

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to write what the disk does not take."""
WAITING, ANSWERED, FAILED = 0, 1, 2


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One line's result."""

    number: int
    is_answered: bool
    entry: Entry | None
    """Its row of the ledger, as far as that is known before it is written; None: nothing is owed."""
    output: msgspec.Raw
    """As it stands in the file."""


_decoder = msgspec.json.Decoder(Record)


class Busy(Exception):
    """Another process has it."""


class Journal:
    """One batch's."""

    def __init__(self, path: Path, writing: int, clock: Clock, num_lines: int) -> None:
        self.path = path
        self.states = bytearray(num_lines)
        """Of each line."""
        self.counts = Counts()
        self.is_stuck = False
        """The disk takes nothing at the moment."""
        self._writing = writing
        self._clock = clock
        self._size = 0
        self._pending: list[tuple[Record, bytes, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Lines without a result."""
        return len(self.states) - self.counts.num_completed - self.counts.num_failed

    async def add(self, record: Record) -> None:
        """Returns when it is durable. While the disk is full this waits; nothing of it counts then."""
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((record, msgspec.json.encode(record) + b"\n", durable))
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())
        await durable

    def take(self, record: Record) -> bool:
        """It counts. False: the line had a result."""
        if not 0 <= record.number < len(self.states) or self.states[record.number]:
            return False
        counts, entry = self.counts, record.entry
        self.states[record.number] = ANSWERED if record.is_answered else FAILED
        self.counts = Counts(
            num_completed=counts.num_completed + record.is_answered,
            num_failed=counts.num_failed + (not record.is_answered),
            num_prompt_tokens=counts.num_prompt_tokens + (entry.num_prompt_tokens if entry else 0),
            num_cached_tokens=counts.num_cached_tokens + (entry.num_cached_tokens if entry else 0),
            num_completion_tokens=counts.num_completion_tokens + (entry.num_completion_tokens if entry else 0),
            num_reasoning_tokens=counts.num_reasoning_tokens + (entry.num_reasoning_tokens if entry else 0),
        )
        return True

    def outputs(self) -> Iterator[tuple[bool, bytes]]:
        """What is on the disk, in the order of the lines: whether it is an answer, and as it stands in the file. Runs
        on a thread; raises OSError."""
        places: dict[int, tuple[int, int]] = {}
        offset = 0
        with self.path.open("rb") as reading:
            for raw in reading:
                number = _decoder.decode(raw).number
                places.setdefault(number, (offset, len(raw)))
                offset += len(raw)
            for number in sorted(places):
                record = _decoder.decode(os.pread(reading.fileno(), places[number][1], places[number][0]))
                yield record.is_answered, bytes(record.output)

    async def _write_all(self) -> None:
        try:
            while self._pending:
                batch = self._pending[:]
                try:
                    # Closed under the thread, its number would soon be another file's.
                    await to_its_end(asyncio.to_thread(self._write, b"".join([raw for _, raw, _ in batch])))
                    self.is_stuck = False
                except OSError as error:
                    if not self.is_stuck:
                        log.error("batches: %s cannot be written: %s", self.path.name, error.strerror)
                    self.is_stuck = True
                    await self._clock.sleep(RETRY_S)
                    continue
                del self._pending[: len(batch)]
                for record, _, durable in batch:
                    self.take(record)
                    if not durable.done():
                        durable.set_result(None)
        finally:
            self._task = None

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._writing, view) :]
            os.fdatasync(self._writing)
        except OSError:
            os.ftruncate(self._writing, self._size)
            raise
        self._size += len(data)

    def read(self) -> list[Entry]:
        """Everything that was written before; the rows that went with it. Runs on a thread; raises OSError."""
        entries: list[Entry] = []
        with self.path.open("rb") as reading:
            for raw in reading:
                try:
                    if not raw.endswith(b"\n"):
                        raise msgspec.DecodeError("cut short")
                    record = _decoder.decode(raw)
                except msgspec.DecodeError as error:
                    if reading.peek(1):
                        raise
                    log.info("batches: the end of %s was never counted: %s", self.path.name, error)
                    break
                self._size += len(raw)
                if self.take(record) and record.entry is not None:
                    entries.append(record.entry)
        os.ftruncate(self._writing, self._size)
        return entries

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@contextlib.asynccontextmanager
async def opened(path: Path, clock: Clock, num_lines: int) -> AsyncIterator[Journal]:
    """Empty, or as far as it had come; ``read`` says how far. Raises Busy and OSError."""
    writing = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(writing, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(path.name) from None
        journal = Journal(path, writing, clock, num_lines)
        try:
            yield journal
        finally:
            await journal.close()
    finally:
        os.close(writing)
