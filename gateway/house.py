"""What a handler finds in the application: the gateway's parts, opened by ``app`` and in use until it closes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from gateway.cache import Cache
from gateway.clock import Clock
from gateway.dispatch import Dispatch
from policies.settings import Settings

if TYPE_CHECKING:
    from gateway.auth import Auth
    from gateway.batches.book import Book
    from gateway.chats.shelf import Chats
    from gateway.console.sessions import Sessions
    from gateway.conversations.shelf import Conversations
    from gateway.directory import Directory
    from gateway.exports.process import Exports
    from gateway.files import Files
    from gateway.files.uploads import Uploads
    from gateway.gateways import Gateways
    from gateway.grammars import Grammars
    from gateway.idempotency import Idempotency
    from gateway.ledger import Ledger
    from gateway.ledger.usage import Usage
    from gateway.limits import Limits
    from gateway.live import Live
    from gateway.metrics import Metrics
    from gateway.pressure import Pressure
    from gateway.prices import PriceHistory, Prices
    from gateway.redis import Redis
    from gateway.responses import Responses
    from gateway.sinks.delivery import Delivery
    from gateway.sockets import Sockets
    from gateway.store import Store
    from gateway.tracing.tracer import Tracing
    from gateway.trials import Trials
    from gateway.upstreams.registry import Upstreams
    from gateway.webhooks import Webhooks


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts."""

    settings: Settings
    clock: Clock
    store: Store
    directory: Directory
    auth: Auth
    idempotency: Idempotency
    cache: Cache
    limits: Limits
    dispatch: Dispatch
    ledger: Ledger
    usage: Usage
    redis: Redis | None
    """None: this gateway is alone, and what gateways share is in its memory."""
    gateways: Gateways
    webhooks: Webhooks
    trials: Trials
    prices: Prices
    price_history: PriceHistory
    exports: Exports
    files: Files
    uploads: Uploads
    batches: Book
    pressure: Pressure
    responses: Responses
    sockets: Sockets
    chats: Chats
    conversations: Conversations
    grammars: Grammars
    live: Live
    upstreams: Upstreams
    sessions: Sessions
    sinks: Sequence[Delivery]
    tracing: Tracing | None = None
    """None: no traces are made."""
    metrics: Metrics | None = None
    """None: nothing is measured for /metrics."""


GATEWAY = web.AppKey("GATEWAY", Gateway)
"""Apart from ``app``, which knows the handlers, so that the handlers need not know ``app``."""
