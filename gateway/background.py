"""Work that goes on beside other work, and has an owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextlib.asynccontextmanager
async def alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """``work`` runs while the block does, and is over when that is left. It should see to its own failures: one that
    ends it is said in the log, and the block goes on without it."""
    task = asyncio.create_task(work)
    task.add_done_callback(_tell)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def within(limit_s: float, work: Coroutine[Any, Any, object], what: object) -> None:
    """Until ``work`` is done, or for so long: then it is cancelled, and nobody waits for it any more. How it failed is
    in the log, with ``what`` it is."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        is_late = not task.done()
        task.cancel()
    if is_late:
        log.error("%s has not ended in %.3g s, and is left to itself", what, limit_s)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has ended by a failure", what, exc_info=error)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. It is not broken off where its caller is cancelled, who waits for its end all the same,
    however often: a server that goes cancels whoever answers, and does so again as it closes the connection."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody asks for it any more
        raise


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended by a failure", task.get_coro(), exc_info=error)
