"""A response's events to one client that reads along, here or at another gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from aiohttp import web

from gateway.head import HUNG_UP
from gateway.house import Gateway
from gateway.reply.events import Outlet
from gateway.responses.events import obfuscated
from gateway.responses.running import FLUSH_S, Running
from gateway.responses.shelf import Kept
from gateway.shelving import ShelfAway, pieces

T = TypeVar("T")
NUM_AT_ONCE = 100
"""Events that are padded before others have their turn: some 3 ms."""


async def relay(
    outlet: Outlet, gw: Gateway, kept: Kept, running: Running | None, first: int, obfuscates: bool = False
) -> web.StreamResponse:
    """From the event of number ``first`` on, to the last. ``running``: where it is written here. ``obfuscates``: deltas
    are padded, also those that were not when they were written."""
    async with outlet:
        try:
            await outlet.open()
            told = _written(running, first) if running is not None else _stored(gw, kept, first)
            async for events in told:
                for places in pieces({place: len(event) for place, event in enumerate(events)}):  # others in between
                    some = events[places[0] : places[-1] + 1]
                    if obfuscates:
                        some = await _padded(some)
                    await outlet.write(b"".join(some))
            return await outlet.end(b"")
        except ConnectionResetError:
            return outlet.response or web.Response(status=HUNG_UP)


async def _padded(events: Sequence[bytes]) -> Sequence[bytes]:
    """Many of them beside the event loop."""
    if len(events) <= NUM_AT_ONCE:
        return list(map(obfuscated, events))
    return await asyncio.to_thread(lambda: list(map(obfuscated, events)))


async def _written(running: Running, first: int) -> AsyncIterator[Sequence[bytes]]:
    while events := await running.log.more(first):
        first += len(events)
        yield events


async def _stored(gw: Gateway, kept: Kept, first: int) -> AsyncIterator[Sequence[bytes]]:
    """What the store says of one that another gateway writes, or that has ended. Who has heard more of it than is
    stored, from a gateway that then lost it, is told its end all the same."""
    shelf, now, asked = gw.responses.shelf, kept, first
    while True:
        if events := await _told(gw, partial(shelf.events, kept.id, first)):
            first += len(events)
            yield events
        if not now.is_open:
            if first == asked and now.status in ("failed", "cancelled"):
                number, end = await _told(gw, partial(shelf.end_of, kept.id))
                if number + 1 < first:
                    yield end
            return
        await gw.clock.sleep(FLUSH_S)
        found = await _told(gw, partial(shelf.find, kept.tenant_id, kept.id))
        if found is None:
            return
        now = found


async def _told(gw: Gateway, asked: Callable[[], Awaitable[T]]) -> T:
    """What the store says, once it can be reached: a stream that has begun goes on then, for as long as its client
    waits."""
    while True:
        try:
            return await asked()
        except ShelfAway:
            await gw.clock.sleep(FLUSH_S)
