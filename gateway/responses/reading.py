"""A response's events to one client that reads along, here or at another gateway."""

from __future__ import annotations

from aiohttp import web

from gateway.house import Gateway
from gateway.reply.events import Outlet
from gateway.responses.running import FLUSH_S, Running
from gateway.responses.shelf import Kept


async def relay(outlet: Outlet, gw: Gateway, kept: Kept, running: Running | None, first: int) -> web.StreamResponse:
    """From the event of number ``first`` on, to the last. ``running``: where it is written here."""
    async with outlet:
        response = await outlet.open()
        try:
            if running is not None:
                while events := await running.log.more(first):
                    first += len(events)
                    await outlet.write(b"".join(events))
            else:
                await _told(outlet, gw, kept, first)
            return await outlet.end(b"")
        except ConnectionResetError:
            return response


async def _told(outlet: Outlet, gw: Gateway, kept: Kept, first: int) -> None:
    """What the store says of one that another gateway writes, or that has ended."""
    shelf, now = gw.responses.shelf, kept
    while True:
        if events := await shelf.events(kept.id, first):
            first += len(events)
            await outlet.write(b"".join(events))
        if not now.is_open:
            return
        await gw.clock.sleep(FLUSH_S)
        found = await shelf.find(kept.tenant_id, kept.id)
        if found is None:
            return
        now = found
