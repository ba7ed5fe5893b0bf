"""Answers in the memory of this gateway: bounded in bytes, fair among those whose they are, each until its time is
up."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from gateway.clock import Clock

ENTRY_BYTES = 500
"""What an entry takes besides its value: its name, its places in three tables, its instant."""


class Held(NamedTuple):
    """What a store holds of one scope, or of all."""

    num_entries: int
    num_bytes: int


class Keeper(Protocol):
    """Where answers are kept, under the scope whose they are and their name in it."""

    async def get(self, scope: bytes, name: bytes) -> bytes | None:
        """The value, if it is there; never late, and never an exception."""

    def put(self, scope: bytes, name: bytes, value: bytes, ttl_s: float) -> None:
        """Keeps it, if that can be done: whoever asks next may find it."""

    async def flush(self, scope: bytes) -> int:
        """Forgets all that is kept for this scope; how many there were."""

    async def held(self, scope: bytes | None = None) -> Held:
        """None: all scopes."""


class Memory:
    """A ``Keeper``. When it is full, a scope that has an equal share of it makes room in its own, so nobody drives out
    what others keep by asking much; a scope that has less takes the place of whatever was used least recently."""

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, bytes], tuple[bytes, float]] = OrderedDict()
        """Value and the instant of its end, by scope and name; the least recently used first."""
        self._scopes: dict[bytes, Scope] = {}
        self._num_bytes = 0

    async def get(self, scope: bytes, name: bytes) -> bytes | None:
        key = (scope, name)
        found = self._entries.get(key)
        if found is None:
            return None
        value, ends_at = found
        if ends_at <= self._clock.now():
            self._forget(key)
            return None
        self._entries.move_to_end(key)
        self._scopes[scope].names.move_to_end(name)
        return value

    def put(self, scope: bytes, name: bytes, value: bytes, ttl_s: float) -> None:
        key = (scope, name)
        self._forget(key)
        num_bytes = len(value) + ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._forget(self._least_useful(scope, num_bytes))
        mine = self._scopes.get(scope)
        if mine is None:
            mine = self._scopes[scope] = Scope()
        self._entries[key] = (value, self._clock.now() + ttl_s)
        mine.names[name] = None
        mine.num_bytes += num_bytes
        self._num_bytes += num_bytes

    async def flush(self, scope: bytes) -> int:
        mine = self._scopes.get(scope)
        names = [] if mine is None else list(mine.names)
        for name in names:
            self._forget((scope, name))
        return len(names)

    async def held(self, scope: bytes | None = None) -> Held:
        if scope is None:
            return Held(len(self._entries), self._num_bytes)
        mine = self._scopes.get(scope)
        return Held(0, 0) if mine is None else Held(len(mine.names), mine.num_bytes)

    def _least_useful(self, scope: bytes, num_bytes: int) -> tuple[bytes, bytes]:
        """The entry that goes when ``scope`` needs room for so many bytes."""
        mine = self._scopes.get(scope)
        if mine is not None and (mine.num_bytes + num_bytes) * len(self._scopes) > self._max_bytes:
            return scope, next(iter(mine.names))
        return next(iter(self._entries))

    def _forget(self, key: tuple[bytes, bytes]) -> None:
        found = self._entries.pop(key, None)
        if found is None:
            return
        scope, name = key
        theirs, num_bytes = self._scopes[scope], len(found[0]) + ENTRY_BYTES
        del theirs.names[name]
        theirs.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not theirs.names:
            del self._scopes[scope]


class Scope:
    """What is kept for one of them."""

    __slots__ = ("names", "num_bytes")

    def __init__(self) -> None:
        self.names: OrderedDict[bytes, None] = OrderedDict()
        """The least recently used first."""
        self.num_bytes = 0
