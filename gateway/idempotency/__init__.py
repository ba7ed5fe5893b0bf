"""Idempotency-Key: a request that is repeated under the same key is answered once, and billed once.

The repetition gets the very bytes of the first answer: all of them when it comes later, or as they are said while the
first one is still being answered. Such a request runs to its end whether or not its client stays, as a client that
lost its connection is the one that repeats. Failures are not kept. (The header is the one of
draft-ietf-httpapi-idempotency-key-header.)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from hashlib import blake2b

from aiohttp import web
from multidict import istr

from gateway import errors, failures, head
from gateway.auth import Caller
from gateway.cache import Memory
from gateway.clock import Clock
from gateway.head import HEAD, HUNG_UP
from gateway.idempotency.record import Record
from gateway.idempotency.slots import Slot, Slots, check
from gateway.redis import Redis
from gateway.reply.events import OUTLET, EventStream
from policies import settings

__all__ = ["Idempotency"]

HEADER = istr("idempotency-key")
REPLAYED = "idempotent-replayed"
"""Stripe's name for it."""

Answer = Callable[[], Awaitable[web.StreamResponse]]


class Running:
    """A key that is being answered."""

    def __init__(self, asked: bytes, record: Record, task: asyncio.Task[None]) -> None:
        self.asked = asked
        self.record = record
        self.task = task


class Idempotency:
    """All keys that are being answered here, and those that were."""

    def __init__(
        self,
        config: settings.Settings,
        secret: bytes,
        memory: Memory,
        redis: Redis | None,
        clock: Clock,
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``inside``: what is answered without a client is inside all the same, so that nothing closes around it."""
        self._config = config
        self._secret = secret
        self._slots = Slots(memory, redis, config.cache.idempotency_ttl_s, clock)
        self._clock = clock
        self._inside = inside
        self._running: dict[bytes, Running] = {}

    def once(self, request: web.Request, caller: Caller, body: bytes, answer: Answer) -> Awaitable[web.StreamResponse]:
        """``answer()``, which the request's ``body`` was parsed for; or, under a key that was used before, what it was
        answered with. Raises what ``answer`` raises, InvalidRequest, IdempotencyKeyReused, ServiceUnavailable."""
        key = request.headers.get(HEADER)
        return answer() if key is None else self._once(request, caller, body, answer, key)

    async def _once(
        self, request: web.Request, caller: Caller, body: bytes, answer: Answer, key: str
    ) -> web.StreamResponse:
        if not re.fullmatch(r"[\x20-\x7e]{1,255}", key):
            raise errors.InvalidRequest(
                "An Idempotency-Key has 1 to 255 printable characters of ASCII", param="Idempotency-Key"
            )
        scope = self._named(caller.tenant_id, 16)
        name = self._named(f"{caller.tenant_id}\0{request.path}\0{key}", 32)
        asked = blake2b(body, digest_size=32).digest()
        running = self._running.get(name)
        if running is None:
            record = request[OUTLET] = Record(request[HEAD].request_id)
            slot = self._slots.slot(scope, name, asked)
            refuses = caller.policy.without_redis == "refuse"
            task = asyncio.create_task(self._answer(name, slot, record, refuses, answer))
            running = self._running[name] = Running(asked, record, task)
        check(running.asked, asked)
        return await self._relay(request, running.record)

    def _named(self, owner: str, num_bytes: int) -> bytes:
        return blake2b(owner.encode(), digest_size=num_bytes, key=self._secret[:64], person=b"penstock once").digest()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """On leaving, what is still being answered is broken off."""
        yield
        await asyncio.sleep(0)  # a request that has only just come is under its key, if it is not yet
        running = list(self._running.values())
        for each in running:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in running), return_exceptions=True)
        for each in running:  # here, for a task that never had its first turn tells nobody
            if not each.record.is_over:
                each.record.give_up(errors.Draining("This server is shutting down."))

    async def _answer(self, name: bytes, slot: Slot, record: Record, refuses: bool, answer: Answer) -> None:
        """Until all is said and kept. Whatever goes wrong is told to those who read."""
        try:
            with self._inside():
                found = await slot.find(refuses)
                if found is not None:
                    record.repeat(found)
                    return
                async with slot.renewed():
                    try:
                        record.finish(await answer())
                    finally:
                        is_whole = record.is_over and not record.has_failed
                        await (slot.keep(record.recorded(slot.asked)) if is_whole else slot.free())
        except Exception as error:
            record.give_up(error)
        finally:
            del self._running[name]

    async def _relay(self, request: web.Request, record: Record) -> web.StreamResponse:
        """What the record says, to one client."""
        noted = request[HEAD]
        if record.request_id != noted.request_id:
            noted.replay_at = time.monotonic()
        await record.begun()
        if record.request_id != noted.request_id:
            noted.request_id = record.request_id
            noted.replay_at = noted.replay_at or time.monotonic()
            head.also(request, {REPLAYED: "true"})
        if not record.is_stream:
            return head.Whole(b"".join(record.said))
        async with EventStream(request, self._config.server, self._clock) as stream:
            try:
                num_read = 0
                await stream.open()
                record.num_readers += 1
                try:
                    while chunks := await record.more(num_read):
                        num_read += len(chunks)
                        if await stream.write(b"".join(chunks)):
                            record.passed_on(num_read)
                finally:
                    record.num_readers -= 1
                if record.error is not None:
                    return await stream.fail(failures.event(failures.described(record.error, record.request_id)))
                return await stream.end(b"")
            except ConnectionResetError:
                return stream.response or web.Response(status=HUNG_UP)
