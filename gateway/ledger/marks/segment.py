"""A file of marks: up to a thousand streams, what each would owe, and how far it has come.

    header | slots of 64 bytes, one a stream | openings

A slot is eight numbers: where its opening lies and its check sum, then what changes while the stream is delivered. The
slots are memory that the file shares with the process. So a process that is killed leaves them as they were at that
moment, and each number is wholly old or wholly new; what a machine leaves that is switched off is what ``sync`` was
last called for. The file's blocks are written before it is used: a disk that has become full takes further marks in
them. A slot is used once. The process that writes the file holds a lock on it for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import zlib
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import msgspec

from gateway.ledger.entry import Entry
from policies.answers import Outcome
from policies.pricing import Rates

MAGIC = b"penstock marks 1"
SUFFIX = ".marks"
NUM_SLOTS = 1024
NUM_WORDS = 8
"""Of a slot, eight bytes each."""
SLOTS_AT, OPENINGS_AT = 4096, 4096 + NUM_SLOTS * NUM_WORDS * 8
FILE_BYTES = 1 << 20
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


OUTCOME_BITS = 8


class Word(IntEnum):
    """The numbers of a slot."""

    PLACE = 0
    """Where its opening lies: the offset, and in the last 24 bits its length; 0: nothing is open."""
    CHECK = 1
    """CRC 32 of the opening."""
    TOKENS = 2
    """Of the completion, delivered."""
    CACHED_TOKENS = 3
    """Of the prompt."""
    OUTCOME = 4
    """Of the cache, as a place in ``OUTCOMES``, in the last 8 bits; before them the completion tokens that are
    reasoning, as of when this was noted."""
    TTFT_US = 5
    """0: there was no token yet."""
    QUEUE_US = 6
    DURATION_US = 7
    """When the numbers above were noted; tokens may have been delivered since."""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What a stream would owe, should nothing more be heard of it."""

    entry: Entry
    """The row, as if nothing had been delivered."""
    rates: str
    """By which it would pay, as ``spelled``; empty: nothing."""


class Left(msgspec.Struct, frozen=True):
    """What a slot says of a stream that was not settled."""

    opening: Opening
    words: tuple[int, ...]


class Segment:
    """A file that is being written. Its slots are memory; ``keep`` and ``sync`` block, on one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """A new one. Raises OSError."""
        self.path = directory / f"{os.getpid()}-{os.urandom(8).hex()}{SUFFIX}"
        with alone_in(directory):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(self._file, MAGIC + bytes(FILE_BYTES - len(MAGIC)), 0)
                os.fsync(self._file)
                _sync_directory(directory)
                self._memory = mmap.mmap(self._file, OPENINGS_AT)
            except BaseException:
                self.path.unlink(missing_ok=True)
                os.close(self._file)
                raise
        self.words = memoryview(self._memory)[SLOTS_AT:].cast("Q")
        self.num_open = 0
        """Streams that were not settled."""
        self._is_closed = False
        self._num_used = 0
        self._end = OPENINGS_AT

    def has_room(self, num_bytes: int) -> bool:
        return self._num_used < NUM_SLOTS and self._end + num_bytes <= FILE_BYTES

    @property
    def is_half_used(self) -> bool:
        return 2 * self._num_used >= NUM_SLOTS or 2 * self._end >= FILE_BYTES + OPENINGS_AT

    def take(self, opening: bytes) -> tuple[int, int]:
        """The next slot, as the place of its first number, and where its opening belongs; there must be room."""
        first, offset = self._num_used * NUM_WORDS, self._end
        self._num_used += 1
        self._end += len(opening)
        self.num_open += 1
        words = self.words
        words[first + Word.CHECK] = zlib.crc32(opening)
        words[first + Word.PLACE] = offset << 24 | len(opening)
        return first, offset

    def end(self, first: int) -> None:
        """The stream is settled."""
        self.words[first + Word.PLACE] = 0
        self.num_open -= 1

    def keep(self, opening: bytes, offset: int) -> None:
        """Raises OSError."""
        if not self._is_closed:
            _write_all(self._file, opening, offset)

    def sync(self) -> None:
        """Returns when all until now is on the disk, if there is anybody whom it is about. Raises OSError."""
        if not self._is_closed:
            os.fdatasync(self._file)

    def remove(self) -> None:
        """With all its streams settled."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leaves the file to whoever recovers it."""
        self._is_closed = True
        self.words.release()
        with contextlib.suppress(BufferError):  # a request that is still being cancelled has a slot in its hands
            self._memory.close()
        os.close(self._file)


@lru_cache(1024)
def spelled(rates: Rates) -> str:
    """As text: a price for a request may be a longer number than MessagePack has."""
    return " ".join(map(str, msgspec.structs.astuple(rates)))


def rates_in(text: str) -> Rates:
    return Rates(*map(int, text.split()))


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """While it lasts no file is made here by others and none is taken over. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def taken_over(path: Path) -> Iterator[int | None]:
    """The file of a process that is gone, open, and nobody else's while this lasts; None: its owner lives, or somebody
    else has it in hand. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield None
    else:
        yield file
    finally:
        os.close(file)


def read(file: int) -> tuple[list[Left], list[str]]:
    """The streams that were not settled, and of those that cannot be read one sentence each. Raises OSError."""
    data = os.pread(file, FILE_BYTES, 0)
    if not data.startswith(MAGIC):  # its process died before it had used it, or it is none of ours
        return [], [] if not any(data) else ["it does not begin as a file of marks does"]
    left, torn = [], []
    data = data.ljust(OPENINGS_AT, b"\0")
    words = memoryview(data)[SLOTS_AT:OPENINGS_AT].cast("Q")
    for first in range(0, len(words), NUM_WORDS):
        slot = tuple(words[first : first + NUM_WORDS])
        offset, length = slot[Word.PLACE] >> 24, slot[Word.PLACE] & 0xFFFFFF
        if not slot[Word.PLACE]:
            continue
        opening = data[offset : offset + length]
        try:
            if offset < OPENINGS_AT or len(opening) < length or zlib.crc32(opening) != slot[Word.CHECK]:
                raise ValueError("its opening is not whole")
            left.append(Left(msgspec.msgpack.decode(opening, type=Opening), slot))
        except ValueError as error:  # msgspec's are among them
            if slot[Word.TOKENS]:  # else it was torn before anything was delivered
                number = first // NUM_WORDS
                torn.append(f"stream {number}, of which {slot[Word.TOKENS]} tokens were delivered: {error}")
    return left, torn


def _write_all(file: int, data: bytes, offset: int) -> None:
    rest: Any = memoryview(data)
    while rest:
        num_written = os.pwrite(file, rest, offset)
        rest, offset = rest[num_written:], offset + num_written


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
