"""The Redis that gateways share: how commands reach it, how long they may take, and what happens when it is away.

Calls made at the same time travel together, as one pipeline over one connection, so that a thousand requests at once
cost a few round trips. Whatever happens to Redis, a call ends: with an answer, or with RedisAway, at once or within two
timeouts. What is kept there, and what to do without it, is known to those who call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from gateway.clock import Clock
from policies import settings

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Calls of one round trip. Fewer would cost more round trips, more would make the first wait for the last."""
MAX_BATCHES = 4
"""Round trips under way at once, each on its own connection."""
MAX_WAITING = 10_000
"""Calls that wait for one of those; what comes beyond is told that Redis is away."""
SETTING = "redis.url (PENSTOCK_REDIS__URL)"
"""By both its names, as it may come from either."""
NOT_NOW = ("BUSY ", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")
"""How refusals begin that are about Redis's own state rather than about the command."""

Word = str | bytes | int | float
Call = tuple[tuple[Word, ...], asyncio.Future[Any]]
"""A command and its answer to be."""
Batch = Sequence[Call]


class RedisAway(Exception):
    """Redis gave no answer, or is being left alone since it gave none. The command may have been done all the same."""


class RedisUrlError(Exception):
    """``redis.url`` cannot be used; the message is one sentence for the operator."""


class Script:
    """A Lua script; Redis knows it by its digest once it has run it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Breaker:
    """Closed, all calls pass. A failure opens it: one call in ``retry_s`` passes then, and its success closes it again.

    The circuit breaker of Nygard's "Release It!", chapter 5.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._next_try_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self._next_try_at is not None

    def passes(self, now: float) -> bool:
        """Whether a call may be made; while it is open, asking is to try."""
        if self._next_try_at is None:
            return True
        if now < self._next_try_at:
            return False
        self._next_try_at = now + self._retry_s
        return True

    def failed(self, now: float) -> None:
        self._next_try_at = now + self._retry_s

    def succeeded(self) -> None:
        self._next_try_at = None


class Redis:
    """Commands to one Redis."""

    def __init__(self, config: settings.Redis, clock: Clock) -> None:
        """Connects with the first call. Raises RedisUrlError."""
        # Imported here: it takes a tenth of a start, and most gateways share nothing.
        from redis import asyncio as client
        from redis import exceptions
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._exceptions = exceptions
        self._away: tuple[type[Exception], ...] = (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.InvalidResponse,
            exceptions.OutOfMemoryError,
            exceptions.ReadOnlyError,
            TimeoutError,
            OSError,
        )
        self._forbidden: type[Exception] = exceptions.NoPermissionError
        self._unanswered: tuple[type[Exception], ...] = (*self._away, exceptions.ResponseError)
        """Why a whole batch is: it may forbid or refuse what begins a connection."""
        self._told: set[str] = set()
        """What it has forbidden, and the log says."""
        try:
            is_local = urlsplit(config.url).scheme == "unix"
            urlsplit(config.url).port  # noqa: B018 (a password with letters such as / makes it none)
        except ValueError:
            raise RedisUrlError(
                f"{SETTING} is no Redis URL, such as redis://user:password@host:6379/0; in a password %40 stands for"
                " @, %3A for :, %2F for / and %23 for #"
            ) from None
        try:
            # Its own timeouts and retries are off: what a call may take is one figure, and it is kept here.
            self._pool = client.ConnectionPool.from_url(
                config.url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=None,
                max_connections=4 * MAX_BATCHES,
                **({} if is_local else {"socket_keepalive": True}),  # for a subscription, which nobody times
            )
            # It connects nowhere yet, and reads the options.
            self._pool.make_connection()  # type: ignore[no-untyped-call]
        except TypeError as error:
            option = str(error).rpartition(" ")[2]
            raise RedisUrlError(f"{SETTING} cannot be used: its option {option} is none that a Redis has") from None
        except (ValueError, exceptions.RedisError) as error:
            raise RedisUrlError(f"{SETTING} cannot be used: {error}") from None
        self.client = client.Redis(connection_pool=self._pool)
        """For what is no command with an answer, such as a subscription; nothing here watches over it."""
        self._prefix = config.prefix
        self._timeout_s = config.timeout_ms / 1e3
        self._clock = clock
        self._breaker = Breaker(config.retry_s)
        self._waiting: deque[Call] = deque()
        self._batches: set[asyncio.Task[None]] = set()
        self._is_due = False
        """A batch will be made of those who wait before the loop turns again."""
        self._is_closed = False

    @property
    def is_away(self) -> bool:
        """The last that was heard of it was a failure."""
        return self._breaker.is_open

    def key(self, name: str) -> str:
        """The name of a key, or of a channel, that belongs to this installation."""
        return self._prefix + name

    async def call(self, *command: Word) -> Any:
        """The answer to one command, such as ``"GET", key``, in bytes. Raises RedisAway.

        Raises redis.exceptions.ResponseError when Redis finds fault with the command.
        """
        if self._is_closed:
            raise RedisAway("this gateway is closing")
        if not self._breaker.passes(self._clock.now()):
            raise RedisAway("Redis is being left alone after a failure")
        if len(self._waiting) >= MAX_WAITING:
            raise RedisAway(f"{MAX_WAITING} calls wait for Redis already")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((command, answer))
        if not self._is_due and len(self._batches) < MAX_BATCHES:
            self._is_due = True
            loop.call_soon(self._begin)
        return await answer

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Word]) -> Any:
        """What a script returns. Raises as ``call`` does."""
        try:
            return await self.call("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except self._exceptions.NoScriptError:  # Redis is new, or its scripts were flushed; nothing was run
            return await self.call("EVAL", script.text, len(keys), *keys, *arguments)

    async def close(self) -> None:
        """Ends what is under way."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, deque()
        _refuse(waiting, RedisAway("this gateway is closing"))
        batches = list(self._batches)
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)
        await self._pool.disconnect()

    # Batches

    def _begin(self) -> None:
        self._is_due = False
        while self._waiting and len(self._batches) < MAX_BATCHES:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            task = asyncio.get_running_loop().create_task(self._carry(batch))
            self._batches.add(task)
            task.add_done_callback(partial(self._ended, batch))

    async def _carry(self, batch: Batch) -> None:
        """There and back."""
        pipeline = self.client.pipeline(transaction=False)
        for command, _ in batch:
            pipeline.execute_command(*command)
        try:
            answers = await self._in_time(pipeline)
        except self._unanswered as error:
            self._fail(RedisAway(str(error) or "no answer"), batch)
        else:
            self._heard(batch, answers)

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Every caller has heard something by now, whatever happened."""
        self._batches.discard(task)
        if task.cancelled():
            _refuse(batch, RedisAway("this gateway is closing"))
        elif (error := task.exception()) is not None:  # our own fault, such as a value that no command takes
            log.error("a batch of Redis commands failed unexpectedly", exc_info=error)
            _refuse(batch, error)
        self._begin()

    async def _in_time(self, pipeline: Any) -> list[Any]:
        """The answers. The time is counted in two halves, and each half begins when the one before was noticed to be
        over: while this process itself stood still, Redis is not what was slow."""
        task = asyncio.ensure_future(pipeline.execute(raise_on_error=False))
        try:
            for _ in range(2):
                await asyncio.wait([task], timeout=self._timeout_s / 2)
                if task.done():
                    answers: list[Any] = task.result()
                    return answers
            raise TimeoutError(f"no answer within {1e3 * self._timeout_s:g} ms")
        finally:
            task.cancel()

    def _heard(self, batch: Batch, answers: list[Any]) -> None:
        refusal: RedisAway | None = None
        for (_, answer), value in zip(batch, answers, strict=True):
            if isinstance(value, self._away) or (isinstance(value, Exception) and str(value).startswith(NOT_NOW)):
                value = refusal = RedisAway(str(value))
            elif isinstance(value, self._forbidden):  # others may be allowed
                self._tell(str(value))
                value = RedisAway(str(value))
            if answer.done():
                continue
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)
        if refusal is not None:
            return self._fail(refusal)
        if self._breaker.is_open:
            log.warning("Redis answers again")
        self._breaker.succeeded()

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.error("Redis forbids a command that gateways need: %s", what)

    def _fail(self, reason: RedisAway, batch: Batch = ()) -> None:
        """Those who wait for a connection need not try for themselves."""
        if not self._breaker.is_open:
            log.warning("the Redis of %s is away: %s", SETTING, reason)
        self._breaker.failed(self._clock.now())
        waiting, self._waiting = self._waiting, deque()
        _refuse((*batch, *waiting), reason)


def _refuse(batch: Batch, error: BaseException) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(RedisAway(str(error)) if isinstance(error, RedisAway) else error)
