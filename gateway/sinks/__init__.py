"""The ledger's rows on their way to whoever bills by them: ``config`` reads who that is, ``events`` says what a row is
to them, a file for each kind how they are spoken to, ``sending`` and ``delivery`` bring it there, and ``book`` keeps
what became of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import aiohttp
import yarl

from gateway.background import alongside
from gateway.clock import Clock
from gateway.sinks.config import SinkInvalid, kind_of, secrets_of, url_of
from gateway.sinks.delivery import Delivery
from gateway.sinks.events import Kind
from gateway.sinks.sending import Sender
from gateway.store import Store
from policies.settings import Settings

__all__ = ["SinkInvalid", "receivers", "watched"]


class Receiver(NamedTuple):
    """Of a sink."""

    kind: Kind
    key: str
    url: yarl.URL


def receivers(config: Settings, environ: Mapping[str, str]) -> dict[str, Receiver]:
    """By their sinks' names. Raises SinkInvalid."""
    return {
        name: Receiver(*kind_of(name, sink, environ, config.billing.currency), url_of(name, sink))
        for name, sink in config.sinks.items()
    }


@contextlib.asynccontextmanager
async def watched(
    config: Settings, environ: Mapping[str, str], rooms: Store, clock: Clock
) -> AsyncIterator[list[Delivery]]:
    """While this lasts, sinks are sent what is new in the ledger. Raises SinkInvalid."""
    deliveries = []
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()))
        for name, (kind, key, url) in receivers(config, environ).items():
            sink = config.sinks[name]
            sender = Sender(kind, url, session, secrets_of(key, url, sink), sink.timeout_s)
            deliveries.append(Delivery(name, sink, sender, rooms, clock))
            await stack.enter_async_context(alongside(deliveries[-1].watch()))
        yield deliveries
