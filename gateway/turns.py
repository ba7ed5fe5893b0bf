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
        """``refusal``: what is said where too many wait."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free, self._num_waiting = num_threads, 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Of each tenant, those who are next first."""
        self._refusal = refusal

    async def run(self, tenant_id: str, work: Callable[[], T]) -> T:
        """What ``work`` returns, on a thread. Raises what it raises, and ServiceUnavailable."""
        await self._turn(tenant_id)
        loop = asyncio.get_running_loop()
        running = self._threads.submit(work)

        def over(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._next)

        # Not of what waits for it: that may be gone long before the thread is free again.
        running.add_done_callback(over)
        return await asyncio.wrap_future(running)

    async def _turn(self, tenant_id: str) -> None:
        if self._num_free:
            self._num_free -= 1
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
                self._next()
            raise

    def _forget(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        self._num_waiting -= 1
        own = self._waiting[tenant_id]
        own.remove(turn)
        if not own:
            del self._waiting[tenant_id]

    def _next(self) -> None:
        if not self._waiting:
            self._num_free += 1
            return
        tenant_id = next(iter(self._waiting))
        own = self._waiting.pop(tenant_id)
        self._num_waiting -= 1
        turn = own.popleft()
        if own:
            self._waiting[tenant_id] = own
        turn.set_result(None)
