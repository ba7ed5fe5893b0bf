"""Where the answers to Idempotency-Keys are found again: in this gateway's memory, and in the Redis it shares.

In Redis a key is claimed before it is answered, so that two gateways never compute the same request; whoever finds it
claimed waits for the answer. A claim is renewed while its gateway lives, and is over soon after that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator

import msgspec

from gateway import errors
from gateway.cache import Memory
from gateway.clock import Clock
from gateway.idempotency.record import Recorded
from gateway.redis import Redis, RedisAway, Script

log = logging.getLogger(__name__)

LEASE_S = 10.0
POLL_S = 0.1
"""How often one gateway looks whether another has finished."""


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim-1"):
    """Somebody is answering this."""

    asked: bytes
    token: str
    """Of this claim alone."""


_encode = msgspec.msgpack.encode
_decoder: msgspec.msgpack.Decoder[Recorded | Claim] = msgspec.msgpack.Decoder(Recorded | Claim)

CLAIM = Script(
    """
    local found = redis.call('GET', KEYS[1])
    if not found then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
    return found
    """
)
RENEW = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end")
SETTLE = Script(
    """
    local found = redis.call('GET', KEYS[1])
    if found and found ~= ARGV[1] then return end
    if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
    """
)
"""Keeps the answer, or with none frees the key; but only for whoever has claimed it, or when nobody has."""


class Slot:
    """One key of one tenant, while it is being answered."""

    def __init__(self, slots: Slots, scope: bytes, name: bytes, asked: bytes) -> None:
        self._slots = slots
        self._scope = scope
        self._name = name
        self.asked = asked
        """The digest of what is asked."""
        self._claim: bytes | None = None

    async def keep(self, recorded: Recorded) -> None:
        """For whoever uses the key again."""
        value = _encode(recorded)
        self._slots.memory.put(self._scope, self._name, value, self._slots.ttl_s)
        await self._settle(value)

    async def free(self) -> None:
        """There is no answer to keep."""
        await self._settle(b"")

    async def find(self, refuses: bool) -> Recorded | None:
        """What the key has been answered with; None: it is ours to answer. While another gateway answers it, this
        waits. ``refuses``: rather fails than answers without knowing what other gateways do.

        Raises IdempotencyKeyReused, ServiceUnavailable.
        """
        value = await self._slots.memory.get(self._scope, self._name)
        redis = self._slots.redis
        if value is None and redis is not None:
            claim = _encode(Claim(self.asked, uuid.uuid4().hex))
            has_waited = False
            while True:
                try:
                    value = await redis.run(CLAIM, [self._key(redis)], [claim, int(1e3 * LEASE_S)])
                except RedisAway:
                    if refuses or has_waited:
                        raise errors.ServiceUnavailable(
                            "Whether this Idempotency-Key has been answered cannot be known at the moment. "
                            "Please try again.",
                            retry_after_s=1.0,
                        ) from None
                    return None
                if value is None:
                    self._claim = claim
                    return None
                if not isinstance(self._read(value), Claim):
                    break
                has_waited = True
                await self._slots.clock.sleep(POLL_S)
        found = None if value is None else self._read(value)
        return found if isinstance(found, Recorded) else None

    @contextlib.asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """As long as this lasts, nobody else takes the claim."""
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            (failure,) = await asyncio.gather(renewing, return_exceptions=True)
            if isinstance(failure, Exception):
                log.error("a claim on an Idempotency-Key could not be renewed", exc_info=failure)

    def _read(self, value: bytes) -> Recorded | Claim | None:
        """None: of another version. Raises IdempotencyKeyReused."""
        try:
            found = _decoder.decode(value)
        except msgspec.DecodeError:
            return None
        check(found.asked, self.asked)
        return found

    async def _renew(self) -> None:
        redis, claim = self._slots.redis, self._claim
        while redis is not None and claim is not None:
            await self._slots.clock.sleep(LEASE_S / 3)
            with contextlib.suppress(RedisAway):
                await redis.run(RENEW, [self._key(redis)], [claim, int(1e3 * LEASE_S)])

    async def _settle(self, value: bytes) -> None:
        redis = self._slots.redis
        if redis is not None and self._claim is not None:
            with contextlib.suppress(RedisAway):  # the claim will be over by itself
                await redis.run(SETTLE, [self._key(redis)], [self._claim, value, int(1e3 * self._slots.ttl_s)])

    def _key(self, redis: Redis) -> str:
        return redis.key(f"idempotency:{self._name.hex()}")


class Slots:
    """All of them."""

    def __init__(self, memory: Memory, redis: Redis | None, ttl_s: float, clock: Clock) -> None:
        self.memory = memory
        self.redis = redis
        self.ttl_s = ttl_s
        self.clock = clock

    def slot(self, scope: bytes, name: bytes, asked: bytes) -> Slot:
        """``scope`` is the tenant's, ``name`` unique among all of them."""
        return Slot(self, scope, name, asked)


def check(before: bytes, now: bytes) -> None:
    """Raises IdempotencyKeyReused unless the same was asked."""
    if before != now:
        raise errors.IdempotencyKeyReused(
            "This Idempotency-Key was used for another request before. Use a new one for each request that is no "
            "repetition."
        )
