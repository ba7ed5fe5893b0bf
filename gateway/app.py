"""The one place that wires things: opens everything, and closes it in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import (
    admin,
    api,
    batches,
    doors,
    ending,
    metrics,
    open_files,
    openapi,
    responses,
    sinks,
    store,
    telemetry,
    webhooks,
)
from gateway.auth import Auth
from gateway.background import within
from gateway.bootstrap import Born, bootstrap
from gateway.cache import Cache, Memory, Shared
from gateway.certificate import Certificate
from gateway.chats.shelf import Chats
from gateway.clock import Clock
from gateway.console import pages
from gateway.console.sessions import Sessions
from gateway.conversations.shelf import Conversations
from gateway.directory import Directory
from gateway.dispatch import Dispatch
from gateway.doors import Doors, DoorsError, Stop
from gateway.entrance import Entrance
from gateway.exports.process import Exports
from gateway.files import Files
from gateway.files.uploads import Uploads
from gateway.gateways import Gateways
from gateway.grammars import Grammars
from gateway.house import GATEWAY, Gateway
from gateway.idempotency import Idempotency
from gateway.launcher import Launcher
from gateway.leases import Owner
from gateway.ledger import Ledger, Writer, open_chain, writer_for
from gateway.ledger.closing import Closing
from gateway.ledger.marks import Marks
from gateway.ledger.marks.recovery import Recovery
from gateway.ledger.recent import Recent
from gateway.ledger.spool import SpooledWriter
from gateway.ledger.sums import Rollup
from gateway.ledger.tally import Tally
from gateway.ledger.usage import Usage
from gateway.limits import Limits
from gateway.limits.budgets import Budgets
from gateway.live import Live
from gateway.log_level import switch_by_signal
from gateway.meeting import met
from gateway.memory import Need, need_of
from gateway.metrics import Metrics
from gateway.posted import Posted
from gateway.pressure import Pressure
from gateway.prices import PriceHistory, Prices
from gateway.protocol import Server, TimedServer
from gateway.redis import Redis, RedisUrlError
from gateway.sinks import SinkInvalid
from gateway.sockets import Sockets
from gateway.store import StoreError
from gateway.store.wall import Wall
from gateway.text import Text, TextInvalid
from gateway.tracing.order import TracingInvalid, order_of
from gateway.trials import Trials
from gateway.upstreams.registry import Upstreams
from gateway.webhooks import WebhookInvalid
from gateway.workers import NoSocketDirectory, socket_directory
from policies.admission import Alert
from policies.model_source import SourceError
from policies.settings import Settings
from sources import place_of

if TYPE_CHECKING:
    from gateway.tracing.tracer import Tracing

MAX_LINE_BYTES = 64 << 10
"""Of an address with its query."""

MARKS = "marks"
"""In the data directory: what streams have sent."""

log = logging.getLogger(__name__)

BAD_STARTS = (DoorsError, NoSocketDirectory, RedisUrlError, SinkInvalid, StoreError, TracingInvalid, WebhookInvalid)
"""What keeps a gateway from beginning; each is one sentence for the operator."""


async def serve(
    config: Settings,
    environ: Mapping[str, str],
    announce: Callable[[str], None],
    launcher: Launcher | None = None,
    owner: Owner | None = None,
    stop: Stop | None = None,
) -> None:
    """Answers requests until a signal asks it to stop, then lets the running ones finish.

    ``announce`` gets the lines for standard output; ``launcher`` and ``owner``: as for ``Dispatch``; ``stop``: one
    that hears signals already. Raises one of BAD_STARTS, and NothingToServe when what is wrong has been said on
    standard error already.
    """
    stop, house_doors = stop or Stop(), Doors()
    switch_by_signal()
    look_at(config, environ)
    async with contextlib.AsyncExitStack() as stack:
        sockets = doors.listen(config.server)
        for bound in sockets:
            stack.enter_context(bound)
        opening = opened(config, environ, announce, house_doors, sockets, launcher, owner)
        gw: Gateway | None = None
        async with doors.until(stop.asked):
            gw = await stack.enter_async_context(opening)
        if gw is None:
            return
        if await doors.before(stop.asked, gw.dispatch.until_ready()):
            calm_collector()
            announce(f"Penstock ready on {doors.url_of(config.server, sockets[0])}")
            await stop.asked.wait()
        await ending.drain(gw, house_doors, stop)


def look_at(config: Settings, environ: Mapping[str, str]) -> None:
    """Raises those of BAD_STARTS that the settings and the place give rise to: before a first start has shown its
    keys."""
    if config.server.tls_cert:
        Certificate(config.server)
    if any(model.replicas for model in config.models.values()):
        socket_directory().cleanup()
    webhooks.secret_of(config.billing, environ)
    sinks.receivers(config, environ)
    order_of(config, environ)


def show(born: Born | None, announce: Callable[[str], None]) -> None:
    """The keys that a first start has made."""
    if born is not None and born.made:
        announce(f"First start: these keys are shown once, and kept in {born.path}.")
        for name, key in born.made.items():
            announce(f"{name}={key}")


def calm_collector() -> None:
    """What is loaded by now stays, and a request leaves hardly any cycles: the collector looks at new objects alone,
    and less often. By default it takes a seventh of the time of a busy gateway."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@contextlib.asynccontextmanager
async def opened(
    config: Settings,
    environ: Mapping[str, str],
    announce: Callable[[str], None],
    house_doors: Doors,
    sockets: Sequence[socket.socket],
    launcher: Launcher | None = None,
    owner: Owner | None = None,
) -> AsyncIterator[Gateway]:
    """Everything open, while the models load. ``launcher`` and ``owner``: as for ``Dispatch``."""
    async with contextlib.AsyncExitStack() as stack:
        clock = Clock()
        redis = Redis(config.redis, clock) if config.redis.url else None
        if redis is not None:
            stack.push_async_callback(lambda: within(ending.REDIS_S, redis.close(), "Redis"))
        rooms = await stack.enter_async_context(store.opened(config.store))
        recent = Recent(config.console.recent_requests)
        with store.begun(rooms):
            seeds = config.policies, config.prices, config.billing.currency, config.models
            show(await bootstrap(rooms, environ, *seeds), announce)
            directory = await Directory.load(rooms, clock)
            ledger, spool = await stack.enter_async_context(books(config, rooms, clock, house_doors, recent))
        dispatch = Dispatch(config, clock, launcher, owner)
        stack.push_async_callback(ending.dismiss, dispatch.close)
        parts = ending.Parts()
        stack.push_async_callback(parts.close)
        events = await parts.enter(webhooks.opened(config.billing, environ, clock, redis, Posted(rooms).add))
        await parts.enter(directory.watched())
        await parts.enter(Recovery(rooms.data_dir / MARKS, rooms, ledger, spool, clock).watched())
        await parts.enter(Closing(rooms, clock, config.ledger.close_after_s).watched())
        deliveries = await parts.enter(sinks.watched(config, environ, rooms, clock))
        directory.adapters_changed = lambda: dispatch.follow(directory)
        dispatch.follow(directory)

        def num_gateways() -> int:
            return others.num_gateways

        upstreams = await parts.enter(Upstreams(config, environ, clock, dispatch, num_gateways).opened())
        directory.upstreams_changed = lambda: upstreams.follow(directory)
        upstreams.follow(directory)
        live = Live(dispatch, directory, ledger, config.classes, clock, upstreams, house_doors.aside)
        num_expected = config.server.processes
        told = (live.own, upstreams.queues, lambda: directory.revision)
        others = await parts.enter(Gateways(redis, clock, num_expected, dispatch, directory.notice, *told).opened())
        directory.changed = others.beat_soon
        await parts.enter(live.watched(others))

        def alert(reached: Alert) -> None:
            events.post(reached.id, "budget.reached", reached)

        prices, price_history = Prices(directory, base_of=directory.bases.get), PriceHistory(rooms.engine)
        await parts.enter(Rollup(rooms, price_history.rates, clock).watched())
        limits = Limits(config, clock, redis, prices, num_gateways=lambda: others.num_not_gone, alert=alert)
        await parts.enter(limits.watched())
        budgets = Budgets(rooms, directory, limits, clock, ledger.came_late, alert)
        await parts.enter(budgets.watched())
        memory = Memory(config.cache.max_bytes, clock)
        cache = Cache(config.cache, directory.secret, memory if redis is None else Shared(redis), clock)
        idempotency = Idempotency(config, directory.secret, memory, redis, clock, house_doors.inside)
        await parts.enter(idempotency.opened())
        files = Files(rooms, config.files, clock)
        await parts.enter(files.watched())
        uploads = Uploads(rooms, files, clock)
        await parts.enter(uploads.watched())
        wall = await parts.enter(Wall(rooms, clock).watched())
        stored = await parts.enter(responses.opened(rooms, config.responses, clock, house_doors.inside, wall))
        chats = Chats(rooms, config.responses, clock, wall)
        await parts.enter(chats.watched())
        conversations = Conversations(rooms, config.responses, clock, wall)
        await parts.enter(conversations.watched())
        gw = Gateway(
            config,
            clock,
            rooms,
            directory,
            Auth(directory, local_key=environ.get("PENSTOCK_OLLAMA_KEY", "")),
            idempotency,
            cache,
            limits,
            dispatch,
            ledger,
            Usage(rooms, price_history.rates),
            redis,
            others,
            events,
            Trials(),
            prices,
            price_history,
            Exports(),
            files,
            uploads,
            batches.Book(rooms, config.batches, files, others.name, api.endpoints(), wall),
            Pressure(clock, config.server.coalesce_ms / 1e3),
            stored,
            Sockets(config.responses, house_doors.aside),
            chats,
            conversations,
            stack.enter_context(contextlib.closing(Grammars(config.grammars))),
            live,
            upstreams,
            Sessions(config, rooms, directory, clock),
            deliveries,
            await parts.enter(traces(config, environ, clock, recent)),
            Metrics(config, ledger, clock, house_doors, spool, rooms.data_dir / "metrics")
            if config.metrics.enabled
            else None,
        )
        if gw.metrics is not None:
            await parts.enter(gw.metrics.watched(gw))
        await parts.enter(batches.watched(gw, api.endpoints(), house_doors.inside))
        for model in dispatch.models():
            stack.callback(asyncio.create_task(open_model(gw, model.name)).cancel)
        await met(dispatch, config)
        await stack.enter_async_context(answering(gw, house_doors, sockets))
        yield gw


@contextlib.asynccontextmanager
async def books(
    config: Settings, rooms: store.Store, clock: Clock, house_doors: Doors, recent: Recent
) -> AsyncIterator[tuple[Ledger, SpooledWriter | None]]:
    """The ledger, and where rows wait while the store is away, if it can be. Raises StoreError."""
    async with contextlib.AsyncExitStack() as stack:
        writer: Writer = writer_for(rooms)
        spool: SpooledWriter | None = None
        if rooms.database is None:  # another machine's, or another process: it may be away
            writer = spool = SpooledWriter(writer, rooms.data_dir / "spool.db", clock)
        marking = Marks(rooms.data_dir / MARKS, config.ledger.mark_tokens, clock)
        marks = await stack.enter_async_context(marking.opened())
        chain, tally = await open_chain(rooms), Tally(config.classes)
        num_open, another = (lambda: house_doors.num_inside), (lambda: open_chain(rooms))
        ledger = Ledger(writer, config.store, clock, chain, num_open, marks, tally, recent, another)
        if spool is not None:
            spool.came_over = ledger.came_late.set
        stack.push_async_callback(ledger.close, ending.LEDGER_S)
        yield ledger, spool


@contextlib.asynccontextmanager
async def traces(
    config: Settings, environ: Mapping[str, str], clock: Clock, recent: Recent
) -> AsyncIterator[Tracing | None]:
    """As the settings and OpenTelemetry's variables ask for them; None: not at all. Raises TracingInvalid."""
    order = order_of(config, environ)
    if order is None:
        yield None
        return
    from gateway.tracing.tracer import Tracing

    tracing = Tracing(config, order, environ, clock, recent)
    async with tracing.opened():
        yield tracing


@contextlib.asynccontextmanager
async def answering(gw: Gateway, house_doors: Doors, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    """HTTP on the sockets. On leaving, handlers that still run are cancelled."""
    application = web.Application(client_max_size=gw.settings.server.max_body_bytes)
    application[GATEWAY] = gw
    application.add_routes([*api.routes(), *admin.routes(), web.get(openapi.PATH, openapi.serve)])
    if gw.settings.console.enabled:
        application.add_routes(pages.routes())
    if gw.metrics is not None:
        application.router.add_get(metrics.PATH, metrics.serve)
    certificate = Certificate(gw.settings.server) if gw.settings.server.tls_cert else None
    runner = web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.1,
        max_line_size=MAX_LINE_BYTES,
        auto_decompress=False,  # gateway/unpacking.py
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    application_handler = cast(Handler, server.request_handler)
    entrance = Entrance(
        gw, house_doors, api.endpoints(), application_handler, {admin.ROOT: admin.shaped, **api.shapes()}
    )
    server.request_handler = cast(Any, entrance.answer)
    gw.sockets.answer = entrance.answer
    server.__class__ = Server if gw.tracing is None else TimedServer
    connections = cast(Server, server)
    connections.stall_s, connections.files = gw.settings.server.stall_s, open_files.Watch()
    house_doors.is_sending = connections.is_sending
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        if certificate is not None:
            await stack.enter_async_context(certificate.watched(gw.clock))
        for bound in sockets:
            await web.SockSite(runner, bound, ssl_context=None if certificate is None else certificate.context).start()
        yield


async def open_model(gw: Gateway, name: str) -> None:
    """Reads the model's text files and starts its workers, or gives it up."""
    found = await files_of(gw.settings, name)
    if found is None:
        gw.dispatch.give_up(name)
    else:
        text, measure = found
        need = await asyncio.to_thread(measure)
        gw.dispatch.serve(name, text, need, measure)


async def files_of(config: Settings, name: str) -> tuple[Text, Callable[[], Need]] | None:
    """What the model's text files say, and who tells what a worker of it needs; None when a sentence on standard error
    says why they cannot be had."""
    model = config.models[name]
    try:
        place = await asyncio.to_thread(place_of, model.source)
        text = await asyncio.to_thread(Text.load, place, config.text, model.tool_parser, model.reasoning_parser)
        return text, partial(need_of, place, model.engine)
    except (SourceError, TextInvalid) as error:
        telemetry.say(f"penstock: model {name}: {error}")
    except Exception:
        log.exception("model %s cannot be opened", name)
    return None
