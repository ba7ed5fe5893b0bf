"""What happens at the moment, as a stream of server-sent events: one snapshot a second, the same to all who watch."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.errors import Draining, GatewayError
from gateway.live import HISTORY_S, Snapshot

PATH = "/admin/v1/live"
STREAM_S = 3600.0
"""A stream ends after so long; whoever still watches comes again."""
LOOK_S = 5.0
"""Between two looks whether whoever watches still may."""
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class LiveQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    history: Annotated[int, Meta(ge=0, le=HISTORY_S)] = 0
    """Past snapshots that come first, at most."""


async def watch(ask: Ask[LiveQuery, Nothing]) -> web.StreamResponse:
    """Watch what happens: an event each second, whose data is a snapshot. Whoever reads slowly misses some."""
    gw, live = ask.gw, ask.gw.live
    if gw.dispatch.draining:
        raise Draining("This server is shutting down.", retry_after_s=1.0)
    with live.watching():
        num_told, latest = await live.next(live.num_alone if gw.gateways.num_gateways > 1 else 0)
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(ask.request)
        events = [*live.past(ask.query.history), latest]
        ends_at = gw.clock.now() + STREAM_S
        looked_at = gw.clock.now()
        while True:
            async with asyncio.timeout(gw.settings.server.stall_s):
                await response.write(b"".join(b"data: " + event + b"\n\n" for event in events))
            if gw.dispatch.draining or gw.clock.now() >= ends_at:
                return response
            if gw.clock.now() >= looked_at + LOOK_S:
                looked_at = gw.clock.now()
                try:
                    await ask.look_again()
                except GatewayError:
                    return response
            num_told, latest = await live.next(num_told)
            events = [latest]


ENDPOINTS = [
    Endpoint(
        "GET",
        PATH,
        watch,
        Snapshot,
        OPERATORS,
        query=LiveQuery,
        limit_s=2 * STREAM_S,
        files=("text/event-stream",),
    )
]
