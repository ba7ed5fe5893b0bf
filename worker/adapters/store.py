"""The adapters of one base: which are known, which are in memory, and who uses them.

Files are read on a thread of their own, one after another. What is in memory stays within a bound: the adapter that was
used least recently makes room, never one that is in use. One that made room is read again when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from worker.adapters.adapter import Adapter
from worker.adapters.errors import AdapterError
from worker.handing import handed

Load = Callable[[str, str, int, str], Adapter]
"""An adapter by its id, its source, the most bytes that it may take, and the digest that its files must have or "".
Raises AdapterError."""


MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class Loaded:
    """It can be used; it may have had to make room since."""

    adapter_id: str
    digest: str
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be used, and is not known any more."""

    adapter_id: str
    reason: str


@dataclass(slots=True)
class _Entry:
    adapter_id: str
    source: str
    digest: str
    """Of the files as they were loaded first; empty: they were not, and nobody has said."""
    is_wanted: bool = True
    """Else it stays only for those who use it or wait for it."""
    adapter: Adapter | None = None
    told: Loaded | None = None
    num_users: int = 0
    num_waiting: int = 0
    used_at: int = 0
    """A count of uses, not a time."""


class Store:
    """Not safe for two threads, but for the loading itself."""

    def __init__(self, load: Load, max_bytes: int, executor: Executor, wake: Callable[[], None]) -> None:
        """``wake`` is called on the loading thread when ``turn`` has something to do."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of the adapters in memory."""
        self.lacks_room = False
        """The next to be read does not fit, and what is there is in use."""
        self._load, self._executor, self._wake = load, executor, wake
        self._entries: dict[str, _Entry] = {}
        self._queue: deque[_Entry] = deque()
        """To be read, in order."""
        self._reading: tuple[_Entry, Future[Adapter]] | None = None
        self._num_uses = 0
        self._digests: dict[str, str] = {}
        """Of all that were ever read, the last MAX_REMEMBERED: an id never stands for other weights, since keys and
        values that were computed with them may still be cached."""

    def __len__(self) -> int:
        """Of those that are known."""
        return len(self._entries)

    def knows(self, adapter_id: str) -> bool:
        """Whether it can be asked for, in memory or not."""
        return adapter_id in self._entries

    @property
    def num_in_memory(self) -> int:
        """Adapters that can be used at once."""
        return sum(entry.adapter is not None for entry in self._entries.values())

    def want(self, adapter_id: str, source: str, digest: str = "") -> Loaded | None:
        """From now on it can be asked for; None: ``turn`` will say whether it can."""
        entry = self._entries.get(adapter_id)
        if entry is None:
            entry = self._entries[adapter_id] = _Entry(adapter_id, source, digest or self._digests.get(adapter_id, ""))
            self._queue.append(entry)
            self.go_on()
        entry.is_wanted = True
        return entry.told

    def forget(self, adapter_id: str) -> None:
        """It goes when the last of those who use it, or wait for it, has gone."""
        entry = self._entries.get(adapter_id)
        if entry is not None:
            entry.is_wanted = False
            self._leave(entry)

    def take(self, adapter_id: str) -> Adapter | None:
        """For one user, until ``give_back``; None: it is not in memory now. It must be known."""
        entry = self._entries[adapter_id]
        if entry.adapter is not None:
            entry.num_users += 1
            self._num_uses += 1
            entry.used_at = self._num_uses
        return entry.adapter

    def give_back(self, adapter_id: str) -> None:
        """By one who took it; with the last one it may go."""
        entry = self._entries[adapter_id]
        assert entry.num_users > 0, "an adapter is given back that nobody has"
        entry.num_users -= 1
        self._leave(entry)
        self.go_on()

    def wait_for(self, adapter_id: str) -> None:
        """Somebody waits until it is in memory, or ``turn`` says that it cannot be; until ``stop_waiting``."""
        entry = self._entries[adapter_id]
        entry.num_waiting += 1
        is_coming = entry in self._queue or (self._reading is not None and self._reading[0] is entry)
        if entry.adapter is None and not is_coming:
            self._queue.append(entry)
            self.go_on()

    def stop_waiting(self, adapter_id: str) -> None:
        """By one who waited, whether or not it has come; of one that was refused meanwhile, nothing."""
        entry = self._entries.get(adapter_id)
        if entry is not None:  # else it was refused
            entry.num_waiting -= 1
            self._leave(entry)
            self.go_on()

    def is_in_memory(self, adapter_id: str) -> bool:
        """It must be known."""
        return self._entries[adapter_id].adapter is not None

    def turn(self) -> Loaded | Refused | None:
        """What has been read since the last call, if it was for the first time or went wrong. Whoever waits for it
        should take it before ``go_on``."""
        if self._reading is None or not self._reading[1].done():
            return None
        (entry, reading), self._reading = self._reading, None
        self.lacks_room = False
        return self._read(entry, reading)

    def go_on(self) -> None:
        """Begin to read the next, if nothing is being read and there is room."""
        self.lacks_room = False
        while self._reading is None and self._queue:
            entry = self._queue[0]
            if not entry.is_wanted and not entry.num_waiting:
                self._queue.popleft()
                self._leave(entry)
                continue
            # How large it is, nobody knows before it was read once.
            if entry.told is not None and not self._make_room(entry.told.num_bytes):
                self.lacks_room = True
                # Whether one is any good can be said all the same.
                unknown = next((each for each in self._queue if each.told is None), None)
                if unknown is None:
                    return
                entry = unknown
            self._queue.remove(entry)
            digest = entry.told.digest if entry.told is not None else entry.digest
            load = partial(self._load, entry.adapter_id, entry.source, self.max_bytes, digest)
            reading = handed(self._executor.submit, load)
            self._reading = entry, reading
            reading.add_done_callback(lambda _: self._wake())

    def audit(self) -> None:
        """Raises AssertionError."""
        entries = self._entries.values()
        assert self.num_bytes == sum(entry.adapter.num_bytes for entry in entries if entry.adapter is not None)
        assert self.num_bytes <= self.max_bytes, "more adapters are in memory than there is room for"
        for entry in entries:
            assert entry.num_users >= 0
            assert entry.num_waiting >= 0
            assert entry.adapter is not None or not entry.num_users, "an adapter that is in use is gone"
            assert (
                entry.is_wanted or entry.num_users or entry.num_waiting or entry in self._queue or self._is_read(entry)
            )

    # Reading

    def _read(self, entry: _Entry, reading: Future[Adapter]) -> Loaded | Refused | None:
        try:
            adapter = reading.result()
        except Exception as error:
            # Nobody uses it, or it would have been in memory.
            del self._entries[entry.adapter_id]
            reason = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            return Refused(entry.adapter_id, reason)
        if (entry.is_wanted or entry.num_waiting) and self._make_room(adapter.num_bytes):
            entry.adapter = adapter
            self.num_bytes += adapter.num_bytes
            self._num_uses += 1
            entry.used_at = self._num_uses
        elif entry.num_waiting:
            self._queue.append(entry)
        is_first = entry.told is None
        self._digests[entry.adapter_id] = adapter.digest
        if len(self._digests) > MAX_REMEMBERED:
            del self._digests[next(iter(self._digests))]
        entry.told = Loaded(entry.adapter_id, adapter.digest, adapter.rank, adapter.num_bytes)
        self._leave(entry)
        return entry.told if is_first else None

    def _is_read(self, entry: _Entry) -> bool:
        return self._reading is not None and self._reading[0] is entry

    # Room

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many more fit, after those that nobody uses have gone, as many as have to: those that somebody
        waits for at last."""
        idle = [entry for entry in self._entries.values() if entry.adapter is not None and not entry.num_users]
        idle.sort(key=lambda entry: (entry.num_waiting > 0, entry.used_at))
        free = self.max_bytes - self.num_bytes
        if num_bytes > free + sum(entry.adapter.num_bytes for entry in idle if entry.adapter is not None):
            return False
        for entry in idle:
            if self.max_bytes - self.num_bytes >= num_bytes:
                break
            self._free(entry)
            if entry.num_waiting:
                self._queue.append(entry)
        return True

    def _free(self, entry: _Entry) -> None:
        assert entry.adapter is not None
        assert not entry.num_users
        self.num_bytes -= entry.adapter.num_bytes
        entry.adapter = None

    def _leave(self, entry: _Entry) -> None:
        """If nobody has to do with it any more."""
        if entry.is_wanted or entry.num_users or entry.num_waiting or entry in self._queue or self._is_read(entry):
            return
        if entry.adapter is not None:
            self._free(entry)
        self._entries.pop(entry.adapter_id, None)
