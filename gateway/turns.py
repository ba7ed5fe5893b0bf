"""Threads for what would hold up the event loop, which tenants take in turn: of many that wait each tenant has its
part, so that nobody's work is behind all of somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import ServiceUnavailable

MAX_WAITING = 256
"""Pieces of work that wait before more are refused: to tenants that have their part of them."""

T = TypeVar("T")


class Turns:
    """Belongs to one event loop."""

    def __init__(self, num_threads: int, name: str, refusal: str) -> None:
        """``refusal``: what is said where too many wait. Of several threads one tenant has all but one at most, as
        there is no end to some work."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most_own = max(1, num_threads - 1)
        self._own: dict[str, int] = {}
        """Threads that a tenant has, or is about to."""
        self._num_free, self._num_waiting = num_threads, 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Of each tenant, those who are next first."""
        self._refusal = refusal

    async def run(self, tenant_id: str, work: Callable[[], T]) -> T:
        """What ``work`` returns, on a thread. Raises what it raises, and ServiceUnavailable."""
        await self.turn(tenant_id)
        return await self.start(tenant_id, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self, tenant_id: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """At its ``turn``."""
        loop = asyncio.get_running_loop()
        running = self._threads.submit(work)

        def over(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._over, tenant_id)

        # Not of what waits for it: that may be gone long before the thread is free again.
        running.add_done_callback(over)
        return asyncio.wrap_future(running)

    async def turn(self, tenant_id: str) -> None:
        """Waits until a thread is free for this tenant, which has to ``start`` something there. Raises
        ServiceUnavailable."""
        if self._num_free and self._may_have(tenant_id):
            self._take(tenant_id)
            return
        own = self._waiting.get(tenant_id, ())
        num_tenants = len(self._waiting) + (not own)
        if self._num_waiting >= MAX_WAITING and num_tenants * len(own) >= MAX_WAITING:
            raise ServiceUnavailable(self._refusal, retry_after_s=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant_id, turn)
            else:
                self._over(tenant_id)
            raise

    def _may_have(self, tenant_id: str) -> bool:
        return self._own.get(tenant_id, 0) < self._most_own

    def _take(self, tenant_id: str) -> None:
        self._num_free -= 1
        self._own[tenant_id] = self._own.get(tenant_id, 0) + 1

    def _forget(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        own = self._waiting.get(tenant_id)
        if own is None or turn not in own:
            return  # it was found to be over
        self._num_waiting -= 1
        own.remove(turn)
        if not own:
            del self._waiting[tenant_id]

    def _over(self, tenant_id: str) -> None:
        """A thread of this tenant's is free again."""
        self._num_free += 1
        self._own[tenant_id] -= 1
        if not self._own[tenant_id]:
            del self._own[tenant_id]
        while (after := next(filter(self._may_have, self._waiting), None)) is not None:
            own = self._waiting.pop(after)
            self._num_waiting -= 1
            turn = own.popleft()
            if own:
                self._waiting[after] = own
            if not turn.cancelled():
                self._take(after)
                turn.set_result(None)
                return
