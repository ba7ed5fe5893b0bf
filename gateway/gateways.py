"""Which gateways share this installation: each says once a second that it lives, and tells the others of changes.

Their number divides the limits while Redis is away, their reports make up the live queues of all, a worker that rests
does so for each of them that uses it, and a notice makes a change effective everywhere at once. All of it is a help and
nothing more: without Redis things stay as they were last heard, and changes are found by looking at the store. A Redis
that comes back with less than it had is told again who rests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.lanes import LaneView
from gateway.live import GatewayLive
from gateway.log_level import Asked, AskedFor
from gateway.redis import Redis, RedisAway, Script, Word

log = logging.getLogger(__name__)

BEAT_S = 1.0
LIVE_S = 5.0
"""A gateway that was not heard for so long does not count as alive."""
SILENT_S = 60.0
"""One that was not heard for so long is gone: until then it may live, without reaching Redis."""
LISTEN_AGAIN_S = 0.5
"""After the notices' connection broke."""
SEEN_S = 1.0
"""How long whoever made a change waits until the others go by it; then they will by themselves."""
LOOK_S = 0.01
"""Between two looks whether they do."""

_RESTING = """
local function know(set, number, num_changes, first)
  if tonumber(redis.call('GET', number) or 0) >= tonumber(num_changes) then return end
  redis.call('DEL', set)
  for at = first, #ARGV do redis.call('SADD', set, ARGV[at]) end
  redis.call('SET', number, num_changes)
end

local function who_rests(set, number)
  return tonumber(redis.call('GET', number) or 0), redis.call('SMEMBERS', set)
end
"""
"""``know``: what a gateway has heard of more changes than Redis has is put back: it has lost them since."""

BEAT = Script(
    _RESTING
    + """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%d', now_ms), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%d', now_ms - ARGV[3]))
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
redis.call('SET', KEYS[6], ARGV[5], 'PX', ARGV[2])
know(KEYS[3], KEYS[4], ARGV[6], 7)
local num_changes, resting = who_rests(KEYS[3], KEYS[4])
local num_living = redis.call('ZCOUNT', KEYS[1], string.format('%d', now_ms - ARGV[2]), '+inf')
return {num_living, redis.call('ZCARD', KEYS[1]), redis.call('GET', KEYS[5]), num_changes, resting}
"""
)
"""By Redis's own clock, as the gateways' may differ. KEYS: the living, this one's report, the workers that rest, how
many changes of those there were, the log's level, this one's revision. ARGV: its name, how long it counts as alive and
how long until it is gone, in ms, what it reports, the revision of the store that it goes by, and of how many changes it
has heard, with the workers that rest by then. Returns how many live, how many are not gone, the level, the changes, and
who rests."""

REST = Script(
    _RESTING
    + """
know(KEYS[1], KEYS[2], ARGV[3], 4)
redis.call(ARGV[1], KEYS[1], ARGV[2])
redis.call('INCR', KEYS[2])
return {who_rests(KEYS[1], KEYS[2])}
"""
)
"""KEYS as above. ARGV: SADD or SREM, the worker, and what this gateway has heard, as above. Returns the changes, and
who rests."""


class Report(msgspec.Struct, frozen=True):
    """What a gateway says of itself with each beat."""

    name: str
    """ "host:process:random", unlike that of any other gateway."""
    queues: list[LaneView]
    live: GatewayLive | None = None


class Gateways:
    """This gateway among those that share its Redis; alone where there is none."""

    def __init__(
        self,
        redis: Redis | None,
        clock: Clock,
        num_expected: int,
        dispatch: Dispatch,
        changed: Callable[[], None],
        live: Callable[[], GatewayLive | None] = lambda: None,
        elsewhere: Callable[[], list[LaneView]] = list,
        revision: Callable[[], int] = lambda: 0,
    ) -> None:
        """``changed`` is called when another made a change. ``live``: what this one tells of the last minute;
        ``elsewhere``: of the lines for upstreams. ``revision`` of the store that it goes by."""
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.num_gateways = num_expected
        """Those that live, as last heard, at least 1."""
        self.num_not_gone = num_expected
        """With those that may live, and do not reach Redis."""
        self._redis = redis
        self._clock = clock
        self._dispatch = dispatch
        self._changed = changed
        self._live = live
        self._elsewhere = elsewhere
        self._revision = revision
        self._resting: frozenset[str] = frozenset()
        """Of the workers that all of them use, as are the changes."""
        self._resting_here: frozenset[str] = frozenset()
        """Of those that were started here: another gateway may have some of the same name."""
        self._num_changes = 0
        """Of who rests, as far as was heard here."""
        self._put_to_rest: frozenset[str] = frozenset()
        """Those of whom dispatch knows it."""
        self.log_level = AskedFor(clock)
        self._num_asked = 0
        self._due = asyncio.Event()
        """It is time for a beat."""
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Gateways]:
        """Among the others until it closes."""
        if self._redis is not None:
            self._tasks = [self._keep(self._beat_on()), self._keep(self._listen_on(self._redis))]
        try:
            yield self
        finally:
            await self._close()

    async def _close(self) -> None:
        """The others need not wait to notice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.log_level.take(None)
        if self._redis is not None:
            with contextlib.suppress(RedisAway):
                await self._redis.call("ZREM", self._redis.key("gateways"), self.name)

    async def beat(self) -> None:
        """Says that this one lives, and counts those who do."""
        if self._redis is None:
            return
        own = f"gateway:{self.name}", f"revision:{self.name}"
        names = ("gateways", own[0], "resting", "resting:changes", "log-level", own[1])
        keys = [self._redis.key(name) for name in names]
        report = msgspec.json.encode(self.report())
        with contextlib.suppress(RedisAway):
            num_asked = self._num_asked
            told: list[Word] = [self.name, int(1e3 * LIVE_S), int(1e3 * SILENT_S), report, self._revision()]
            told += self._num_changes, *self._resting
            answer = await self._redis.run(BEAT, keys, told)
            num_living, num_not_gone, asked, num_changes, resting = answer
            self.num_gateways, self.num_not_gone = max(1, num_living), max(1, num_not_gone)
            self._hear(num_changes, resting)
            if num_asked == self._num_asked:  # else this is from before what was said here meanwhile
                self.log_level.take(None if asked is None else msgspec.json.decode(asked, type=Asked))
        self._see_to_rest()

    @property
    def resting(self) -> frozenset[str]:
        """Names of workers that are given nothing new."""
        return self._resting | self._resting_here

    async def rest(self, worker_name: str, is_resting: bool) -> None:
        """Has a worker given nothing new, or has it work again, by all gateways that use it. Raises RedisAway."""
        is_ours = any(worker.is_ours for worker in self._dispatch.workers() if worker.name == worker_name)
        if self._redis is None or is_ours:
            others = self._resting_here - {worker_name}
            self._resting_here = others | {worker_name} if is_resting else others
        else:
            keys = [self._redis.key(name) for name in ("resting", "resting:changes")]
            command = "SADD" if is_resting else "SREM"
            told: list[Word] = [command, worker_name, self._num_changes, *self._resting]
            self._hear(*await self._redis.run(REST, keys, told))
        self._see_to_rest()
        await self.tell()

    async def log_from(self, asked: Asked | None) -> None:
        """Has all gateways tell from this level on. Raises RedisAway."""
        if self._redis is not None:
            key = self._redis.key("log-level")
            if asked is None:
                await self._redis.call("DEL", key)
            else:
                left_ms = math.ceil(1e3 * (asked.until - time.time()))
                await self._redis.call("SET", key, msgspec.json.encode(asked), "PX", left_ms)
        self._num_asked += 1
        self.log_level.take(asked)
        await self.tell()

    def beat_soon(self) -> None:
        """Something is new that the others wait to hear."""
        self._due.set()

    async def tell(self, revision: int = 0) -> None:
        """A change was made in the store: the others shall look now. Until all that live go by this revision of it, or
        for ``SEEN_S``. Never raises."""
        if self._redis is not None:
            with contextlib.suppress(RedisAway):
                await self._redis.call("PUBLISH", self._redis.key("changes"), self.name)
                ends_at = self._clock.now() + SEEN_S
                while revision and self._clock.now() < ends_at:
                    seen = await self._of_others(self._redis, "revision")
                    if all(int(each) >= revision for each in seen):
                        break
                    await self._clock.sleep(LOOK_S)

    async def reports(self) -> list[Report]:
        """This one's as of now, then the others' as of their last beat; of those, what Redis can tell."""
        reports = [self.report()]
        if self._redis is not None:
            with contextlib.suppress(RedisAway):
                told = await self._of_others(self._redis, "gateway")
                reports += [msgspec.json.decode(report, type=Report) for report in told]
        return reports

    async def _of_others(self, redis: Redis, kind: str) -> list[bytes]:
        """What those that live have told of it with their last beat. Raises RedisAway."""
        names = [name.decode() for name in await redis.call("ZRANGE", redis.key("gateways"), 0, -1)]
        keys = [redis.key(f"{kind}:{name}") for name in sorted(names) if name != self.name]
        found = await redis.call("MGET", *keys) if keys else []
        return [told for told in found if told is not None]

    def report(self) -> Report:
        """This one's, as of now."""
        return Report(self.name, [*self._dispatch.queues(), *self._elsewhere()], self._live())

    def _hear(self, num_changes: int, resting: list[bytes]) -> None:
        """Who rested when there had been so many changes, unless more is known here meanwhile."""
        if num_changes >= self._num_changes:
            self._num_changes = num_changes
            self._resting = frozenset(name.decode() for name in resting)

    def _see_to_rest(self) -> None:
        resting = self.resting
        changed, self._put_to_rest = resting ^ self._put_to_rest, resting
        for name in changed:
            self._dispatch.rest(name, name in resting)

    def _heard(self) -> None:
        self._changed()
        self._due.set()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("this gateway has lost touch with the others", exc_info=error)

    async def _beat_on(self) -> None:
        while True:
            self._due.clear()
            timer = self._clock.call_later(BEAT_S, self._due.set)
            try:
                await self._beat_once()
                await self._due.wait()
            finally:
                timer.cancel()

    async def _beat_once(self) -> None:
        try:
            await self.beat()
        except Exception:  # one that fails is no reason not to try the next
            log.exception("this gateway cannot tell the others that it lives")

    async def _listen_on(self, redis: Redis) -> None:
        from redis.exceptions import RedisError  # loaded by whoever made the ``Redis``

        while True:
            with contextlib.suppress(RedisError, OSError):
                async with redis.client.pubsub(ignore_subscribe_messages=True) as notices:
                    await notices.subscribe(redis.key("changes"))
                    self._heard()  # what was told while nobody listened here
                    async for _ in notices.listen():
                        self._heard()
            await self._clock.sleep(LISTEN_AGAIN_S)
