"""Work that goes on beside other work, and has an owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

log = logging.getLogger(__name__)


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


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended by a failure", task.get_coro(), exc_info=error)
