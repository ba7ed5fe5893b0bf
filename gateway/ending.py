"""How a gateway ends, and how long each part of that may take: whatever hangs, all of it has ended in ``CLOSING_S``
after ``server.drain_s``, which the grace of service managers (``deploy/``) is made for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

from gateway import ledger, store, telemetry
from gateway.background import within
from gateway.doors import Doors, Stop, before
from gateway.house import Gateway

CUT_S = 5.0
"""How long requests that were cut have to say so and to be settled."""
PARTS_S = 5.0
"""How long what runs beside the requests may take for its last words."""
WORKERS_S = 5.0
"""How long workers that hold nothing more may take to leave."""
KILLED_S = 1.0
"""How long those that are killed then may take to be gone."""
LEDGER_S = 5.0
"""How long the ledger may take to write its last rows."""
REDIS_S = 1.0
"""How long Redis may take to be let go of."""
LAST_S = 2 * telemetry.LAST_S
"""How long lines for standard output and error may take to be written, where nobody reads them."""
CLOSING_S = CUT_S + PARTS_S + WORKERS_S + KILLED_S + LEDGER_S + ledger.CLOSING_S + store.CLOSING_S + REDIS_S + LAST_S
"""All of it."""

T = TypeVar("T")


class Parts:
    """What runs beside the requests: opened one after the other, and closed all at once, so that those that hang do so
    together."""

    def __init__(self) -> None:
        self._opened: list[AbstractAsyncContextManager[Any]] = []

    async def enter(self, part: AbstractAsyncContextManager[T]) -> T:
        entered = await part.__aenter__()
        self._opened.append(part)
        return entered

    async def close(self) -> None:
        parts = reversed(self._opened)
        ends = [within(PARTS_S, part.__aexit__(None, None, None), _name(part)) for part in parts]
        await asyncio.gather(*ends)


def _name(part: object) -> str:
    return getattr(getattr(part, "gen", part), "__qualname__", str(part))


async def dismiss(close: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Workers, which ``close`` lets finish for so long before they are killed."""
    await within(WORKERS_S + KILLED_S, close(WORKERS_S), "the end of a worker")


async def drain(gw: Gateway, house_doors: Doors, stop: Stop) -> None:
    """New requests are refused; running ones finish in ``server.drain_s``, or are cut then, or when it is urgent."""
    gw.dispatch.draining = True
    house_doors.close()
    gw.sockets.close()

    async def emptied() -> None:
        await house_doors.all_left()
        await before(stop.urgent, gw.sockets.all_left())

    if not await before(stop.urgent, house_doors.all_left(), gw.settings.server.drain_s):
        gw.dispatch.cut()
        gw.upstreams.cut()
    await before(asyncio.Event(), emptied(), CUT_S)


def leave(status: int) -> NoReturn:
    """All is closed and the process ends: whatever hangs, such as a thread in a download or on a disk, ends with it,
    and would be waited for otherwise."""
    logging.shutdown()
    os._exit(status)
