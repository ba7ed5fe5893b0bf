"""Answers in the Redis that gateways share: one gateway finds what another has kept. A Redis that is slow or away has
no answers; who looks and who keeps goes on at once."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

from gateway.cache.memory import Held
from gateway.redis import Redis, RedisAway

log = logging.getLogger(__name__)

MAX_WRITES = 256
"""Answers on their way to Redis at once; more are not kept."""
SCAN_KEYS = 1000
"""Looked at in one call."""


class Shared:
    """A ``Keeper``. Redis itself bounds what it holds (``maxmemory``); ``flush`` and ``held`` walk over its keys, as
    nothing asks them but an operator, and raise RedisAway."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._writes: set[asyncio.Task[None]] = set()

    async def get(self, scope: bytes, name: bytes) -> bytes | None:
        try:
            value: bytes | None = await self._redis.call("GET", self._key(scope, name))
        except RedisAway:
            return None
        return value

    def put(self, scope: bytes, name: bytes, value: bytes, ttl_s: float) -> None:
        if len(self._writes) < MAX_WRITES:
            task = asyncio.create_task(self._put(self._key(scope, name), value, ttl_s))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def flush(self, scope: bytes) -> int:
        num = 0
        async for keys in self._keys(scope):
            num += await self._redis.call("UNLINK", *keys)
        return num

    async def held(self, scope: bytes | None = None) -> Held:
        num_entries = num_bytes = 0
        async for keys in self._keys(scope):
            sizes = await asyncio.gather(*(self._redis.call("MEMORY", "USAGE", key) for key in keys))
            num_entries += len(keys)
            num_bytes += sum(size or 0 for size in sizes)
        return Held(num_entries, num_bytes)

    async def _put(self, key: str, value: bytes, ttl_s: float) -> None:
        from redis.exceptions import ResponseError  # loaded by whoever made the ``Redis``

        try:
            await self._redis.call("SET", key, value, "PX", max(1, int(1e3 * ttl_s)))
        except RedisAway:
            return
        except ResponseError as error:
            log.error("Redis does not take an answer: %s", error)

    async def _keys(self, scope: bytes | None) -> AsyncIterator[list[bytes]]:
        """Each at least once, in lists that are not empty."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._redis.key("answer:")) + (scope.hex() if scope else "") + "*"
        cursor = 0
        while True:
            cursor, keys = await self._redis.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_KEYS)
            if keys:
                yield keys
            if not cursor:
                return

    def _key(self, scope: bytes, name: bytes) -> str:
        return self._redis.key(f"answer:{scope.hex()}:{name.hex()}")
