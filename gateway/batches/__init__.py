"""Batches: files of requests that are answered when there is room, at the price and in the class of who can wait.

``book`` knows them, ``reading`` looks at their lines, ``asking`` sends one the way of any request, ``pace`` says how
many may be under way, ``journal`` has their results, ``outputs`` makes files of those, and ``run`` is one batch on its
way. Here is which of them this gateway works on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager

from gateway import errors
from gateway.background import alongside
from gateway.batches.book import Batch, Book, Lost
from gateway.batches.journal import Busy
from gateway.batches.pace import Pace
from gateway.batches.run import BrokenOff, Run
from gateway.entrance import Endpoint
from gateway.files import OVER
from gateway.house import Gateway

__all__ = ["Batch", "Book", "watched"]

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks for batches that nobody works on."""
AGAIN_S = 5.0
"""After one could not go on."""
MAX_RUNS = 32
"""Batches under way at a time; the others wait for their turn."""
MAX_RUNS_OF_ONE = 4
"""Of those, one tenant's: a batch may wait for a day, for a budget say, and nobody else is to wait behind it. Where it
would be others', it makes room (``run.STUCK_S``)."""
RELEASE_S = 2.0
"""So long the store may take to hear that batches are nobody's any more; then their leases say so."""


class Runner:
    """The batches that this gateway works on."""

    def __init__(
        self,
        gw: Gateway,
        endpoints: Mapping[str, Endpoint],
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._gw = gw
        self._book = gw.batches
        self._endpoints = endpoints
        self._inside = inside
        self._pace = Pace(gw)
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_away = False
        """The store, when it was asked last."""

    async def watch(self) -> None:
        """Until it is cancelled; lines under way are broken off then, without being owed."""
        try:
            while True:
                self._book.changed.clear()
                for run in self._runs.values():
                    run.look.set()
                if not self._gw.dispatch.draining:
                    await self._take_some()
                timer = self._gw.clock.call_later(LOOK_S, self._book.changed.set)
                await self._book.changed.wait()
                timer.cancel()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._release()

    async def _take_some(self) -> None:
        try:
            running = [run.batch for run in self._runs.values()]
            claimed = await self._book.claim(running, MAX_RUNS - len(running), MAX_RUNS_OF_ONE)
        except errors.StoreUnavailable as error:
            if not self._is_away:
                log.warning("batches: none can be begun now: %s", error)
            self._is_away = True
            return
        except Exception:
            log.exception("batches: none can be begun now")
            return
        self._is_away = False
        for batch in claimed:
            self._runs[batch.id] = Run(self._gw, self._book, batch, self._pace, self._endpoints, self._inside)
            task = asyncio.create_task(self._work(batch.id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, batch_id: str) -> None:
        run = self._runs[batch_id]
        try:
            await run.work()
            log.info("batch %s: %s", batch_id, run.batch.status)
            if run.batch.status in OVER:
                return
        except Lost:
            log.warning("batch %s: another gateway works on it", batch_id)
        except Busy:
            log.warning("batch %s: its last owner is not gone yet", batch_id)
        except (BrokenOff, errors.GatewayError, OSError) as error:
            log.warning("batch %s: cannot go on now: %s", batch_id, error)
            await self._release(batch_id)  # another gateway may have what this one lacks
        except Exception:
            log.exception("batch %s: cannot go on", batch_id)
            await self._release(batch_id)
        finally:
            if run.batch.status in OVER:
                del self._runs[batch_id]
                self._book.changed.set()
        await self._gw.clock.sleep(AGAIN_S)
        self._runs.pop(batch_id, None)

    async def _release(self, batch_id: str | None = None) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._book.release(batch_id)
        except Exception as error:
            log.warning("batches: %s cannot be released: %s", batch_id or "those of this gateway", error)


@contextlib.asynccontextmanager
async def watched(
    gw: Gateway, endpoints: Mapping[str, Endpoint], inside: Callable[[], AbstractContextManager[None]]
) -> AsyncIterator[None]:
    """While this lasts, batches are worked on. ``endpoints`` by path; ``inside``: a line is inside the house as a
    request is."""
    async with alongside(Runner(gw, endpoints, inside).watch()):
        yield
