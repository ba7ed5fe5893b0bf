"""Answers in the memory of this gateway: bounded in bytes, each until its time is up, the least recently used goes
first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from gateway.clock import Clock

ENTRY_BYTES = 400
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
    """A ``Keeper``."""

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, bytes], tuple[bytes, float]] = OrderedDict()
        """Value and the instant of its end, by scope and name; the least recently used first."""
        self._scopes: dict[bytes, dict[bytes, int]] = {}
        """Bytes by name, by scope."""
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
        return value

    def put(self, scope: bytes, name: bytes, value: bytes, ttl_s: float) -> None:
        key = (scope, name)
        self._forget(key)
        num_bytes = len(value) + ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
        self._entries[key] = (value, self._clock.now() + ttl_s)
        self._scopes.setdefault(scope, {})[name] = num_bytes
        self._num_bytes += num_bytes

    async def flush(self, scope: bytes) -> int:
        names = list(self._scopes.get(scope, ()))
        for name in names:
            self._forget((scope, name))
        return len(names)

    async def held(self, scope: bytes | None = None) -> Held:
        if scope is None:
            return Held(len(self._entries), self._num_bytes)
        names = self._scopes.get(scope, {})
        return Held(len(names), sum(names.values()))

    def _forget(self, key: tuple[bytes, bytes]) -> None:
        if self._entries.pop(key, None) is None:
            return
        scope, name = key
        names = self._scopes[scope]
        self._num_bytes -= names.pop(name)
        if not names:
            del self._scopes[scope]
