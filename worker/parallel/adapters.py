"""Adapters of a model that has several ranks: every rank has its part of one, or none has any.

They are read beside the steps, on a socket of their own and in the same order everywhere. Rank 0 counts them; a step
names one by its number only after all ranks have said that they have it. They keep it until rank 0 has not: that
travels with the next step, or before the next adapter is read.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from worker.adapters import Adapter, AdapterError
from worker.parallel.control import Control, Kept, Read, Refused
from worker.parallel.ranks import Ranks
from worker.runner import Runner


class Shelf:
    """What a rank that is not 0 has read."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.adapters: dict[int, Adapter] = {}
        """By number."""

    def read(self, message: Read) -> Kept | Refused:
        """Beside a step."""
        self.drop(message.gone)
        try:
            adapter = self._runner.load_adapter(message.adapter_id, message.source, message.max_bytes, message.digest)
        except Exception as error:
            return Refused(str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}")
        self.adapters[message.number] = adapter
        return Kept(adapter.digest, adapter.rank, adapter.num_bytes)

    def drop(self, numbers: Iterable[int]) -> None:
        """Of those that this rank has."""
        for number in numbers:
            self.adapters.pop(number, None)


def read_beside(reading: Control, read: Callable[[Read], Kept | Refused]) -> None:
    """On a thread of its own of a rank that is not 0: what it is told to, until rank 0 is gone."""
    with contextlib.suppress(OSError):
        while isinstance(message := reading.hear(), Read):
            reading.tell(read(message))


class Shared:
    """Rank 0's side of it."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._numbers = itertools.count(1)
        self._gone: deque[int] = deque()

    def load(self, adapter_id: str, source: str, max_bytes: int, digest: str) -> Adapter:
        """See ParallelRunner.load_adapter."""
        number = next(self._numbers)
        self._ranks.tell_to_read(Read(number, adapter_id, source, max_bytes, digest, self.gone()))
        try:
            own = self._runner.load_adapter(adapter_id, source, max_bytes, digest)
        except BaseException:
            self._ranks.hear_what_is_read()  # or the next would be taken for this one
            self._gone.append(number)
            raise
        kept = []
        for rank, heard in enumerate(self._ranks.hear_what_is_read(), start=1):
            if isinstance(heard, Kept) and heard.digest == own.digest:
                kept.append(heard)
                continue
            self._gone.append(number)
            why = heard.reason if isinstance(heard, Refused) else "its files have changed while they were read"
            raise AdapterError(f"rank {rank}: {why}")
        adapter = replace(
            own,
            number=number,
            rank=max(own.rank, *(each.rank for each in kept)),
            # All ranks have the same bound, so the one with most of it decides what has to go.
            num_bytes=max(own.num_bytes, *(each.num_bytes for each in kept)),
        )
        weakref.finalize(adapter, self._gone.append, number).atexit = False
        return adapter

    def gone(self) -> list[int]:
        """Numbers that nobody has any more, each said once."""
        numbers = []
        with contextlib.suppress(IndexError):  # two threads may ask
            while self._gone:
                numbers.append(self._gone.popleft())
        return numbers
