"""All upstreams that settings and administrators name, each model's in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from gateway import errors
from gateway.background import alongside
from gateway.clock import Clock
from gateway.dispatch import Dispatch, ServedModel
from gateway.flight import Flight
from gateway.lanes import LaneView
from gateway.resident import State
from gateway.text import Text, TextInvalid
from gateway.upstreams.call import Call
from gateway.upstreams.client import Client
from gateway.upstreams.known import Known, key_of
from gateway.upstreams.pool import Pool
from gateway.upstreams.server import Server, ServerView
from policies import settings, wire
from policies.model_source import SourceError
from policies.priority import Order
from policies.upstreams.terms import Upstream, fault_of
from sources import place_of

if TYPE_CHECKING:
    from gateway.upstreams.asking import Asked
    from gateway.upstreams.here import Here

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at whose turn it is to be probed."""


class Board(Protocol):
    """Where it is written which upstreams administrators have made."""

    upstreams: dict[str, tuple[Upstream, str]]
    """With their keys, by name; another one whenever it has changed."""


class Upstreams:
    """All of them."""

    def __init__(
        self,
        config: settings.Settings,
        environ: Mapping[str, str],
        clock: Clock,
        dispatch: Dispatch,
        num_gateways: Callable[[], int] = lambda: 1,
    ) -> None:
        """``num_gateways``: as for ``Server``."""
        self._config = config
        self._environ = environ
        self._clock = clock
        self._dispatch = dispatch
        self._num_gateways = num_gateways
        self._client = Client()
        self._created = int(time.time())
        self._servers: dict[str, Server] = {}
        self._pools: dict[str, Pool] = {}
        self._idle: dict[str, Pool] = {}
        """Of models that no upstream answers for any more, while some of their requests are under way."""
        self._texts: dict[str, Text] = {}
        """By source, of the tokenizers that upstreams name. One that cannot be had is looked for again when they
        change."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._probed_at: dict[str, float] = {}
        self._followed = asyncio.Event()
        """There may be one to be probed where there was none."""
        self._is_due = False
        """Those who wait go on before the loop turns again."""
        self._settled = {terms.name: Known(terms, key_of(terms, "", environ), "settings") for terms in config.upstreams}
        for known in self._settled.values():
            if known.terms.key_variable and not known.key.value:
                log.warning("upstream %s: the environment has no %s", known.terms.name, known.terms.key_variable)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Upstreams]:
        """While this lasts they can be asked, and are looked after."""
        async with self._client, alongside(self._watch()):
            try:
                yield self
            finally:
                self.cut()
                reading = list(self._reading.values())
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)

    def of(self, model: str) -> Pool | None:
        """Those that answer for this model, beside its workers or in their place."""
        return self._pools.get(model)

    def models(self) -> list[ServedModel]:
        """All that can be asked for, of workers and of upstreams, each as whoever would answer for it now."""
        return [self._relieved(model) for model in self._dispatch.models()] + [
            ServedModel(name, self._created, self._state(pool))
            for name, pool in self._pools.items()
            if not pool.is_overflow
        ]

    def known(self) -> list[Known]:
        """All of them."""
        return [server.known for server in self._servers.values()]

    def view(self, name: str) -> ServerView | None:
        """None where this gateway has none of the name."""
        server = self._servers.get(name)
        return None if server is None else server.view()

    def settled(self, name: str) -> bool:
        """It is of the settings, which nobody changes while they count."""
        return name in self._settled

    def pools(self) -> list[Pool]:
        return [*self._pools.values(), *self._idle.values()]

    def queues(self) -> list[LaneView]:
        """Each class of each model, live."""
        return [view for pool in self.pools() for view in pool.views()]

    def flights(self) -> Iterator[tuple[str, Flight]]:
        """All that have not ended, each with its model."""
        return ((pool.model, call) for pool in self.pools() for call in pool.flights())

    def submit(
        self,
        pool: Pool,
        asked: Asked,
        submit: wire.Submit,
        order: Order,
        here: Here | None = None,
        is_first_here: bool = False,
        is_let_in: bool = False,
    ) -> Call:
        """As ``Dispatch.submit``; the rest as for ``Pool.submit``. Raises QueueFull, UpstreamUnavailable, Draining."""
        if self._dispatch.draining and not is_let_in:
            raise _draining()
        return pool.submit(asked, submit, order, here, is_first_here, is_let_in)

    def follow(self, board: Board) -> None:
        """These are all that there are, beside those of the settings; what is under way goes on."""
        wanted = dict(self._settled)
        for name, (terms, given) in board.upstreams.items():
            faults = [f"{field}: {what}" for field, what in fault_of(terms, self._config.models)]
            if name in self._settled or faults:
                why = faults[0] if faults else "the settings have one of this name"
                log.error("upstream %s is not asked: %s", name, why)
                continue
            wanted[name] = Known(terms, key_of(terms, given, self._environ), "admin")
        servers: dict[str, Server] = {}
        for name, known in wanted.items():
            server = self._servers.get(name)
            if server is None or server.known.terms.url != known.terms.url:
                server = Server(known, self._clock, self._freed, self._num_gateways)
            elif server.known != known:
                server.changed(known)
            servers[name] = server
        self._servers = servers
        self._followed.set()
        self._probed_at = {name: at for name, at in self._probed_at.items() if name in servers}
        self._divide()
        sources = {server.known.terms.tokenizer for server in servers.values()} - {""}
        self._texts = {source: text for source, text in self._texts.items() if source in sources}
        for source in sources - self._texts.keys() - self._reading.keys():
            self._read(source)

    def cut(self) -> None:
        """Ends every call with Draining."""
        for pool in self.pools():
            pool.cut(_draining())

    def _divide(self) -> None:
        """Each model has a pool of its servers."""
        by_model: dict[str, list[Server]] = {}
        for server in self._servers.values():
            by_model.setdefault(server.known.terms.model, []).append(server)
        pools = {}
        for model, servers in by_model.items():
            pool = self._pools.get(model) or self._idle.pop(model, None)
            if pool is None:
                pool = Pool(model, self._config.classes, self._clock, self._client, self.of, self._text_of)
            pool.servers = servers
            pools[model] = pool
        for model, pool in self._pools.items():
            if model not in pools:
                pool.servers = []
                self._idle[model] = pool
        self._idle = {model: pool for model, pool in self._idle.items() if pool.num_open or pool.num_waiting}
        self._pools = pools
        for pool in self.pools():
            pool.changed()

    def _freed(self) -> None:
        """One of them has room again: for whoever has waited longest, whichever model it was asked for, since those of
        one model may stand in for others."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        waiting = [pool for pool in self.pools() if pool.num_waiting]
        for pool in sorted(waiting, key=lambda pool: pool.waits_since):
            pool.changed()

    def _relieved(self, model: ServedModel) -> ServedModel:
        """A model of workers. One that is unloaded is loaded when it is asked for, whoever else could answer."""
        pool = self._pools.get(model.name)
        if pool is None or model.state == "unloaded" or not pool.is_well:
            return model
        return msgspec.structs.replace(model, state="ready")

    def _state(self, pool: Pool) -> State:
        """That of a model that only upstreams have, or of the one here that stands in for it."""
        if pool.is_well:
            return "ready"
        stand_in = pool.local(self._dispatch.serves)
        return "failed" if stand_in is None else self._dispatch.state(stand_in)

    def _text_of(self, model: str) -> Text | None:
        """By which its tokens are counted."""
        if model in self._config.models:
            try:
                return self._dispatch.text(model)
            except errors.GatewayError:  # its files are being read, or cannot be
                return None
        pool = self._pools.get(model)
        sources = [server.known.terms.tokenizer for server in pool.servers] if pool is not None else []
        return next((text for source in sources if (text := self._texts.get(source)) is not None), None)

    def _read(self, source: str) -> None:
        """The tokenizer at ``source``."""
        task = self._reading[source] = asyncio.get_running_loop().create_task(self._read_text(source))
        task.add_done_callback(lambda _: self._reading.pop(source, None))

    async def _read_text(self, source: str) -> None:
        try:
            place = await asyncio.to_thread(place_of, source)
            self._texts[source] = await asyncio.to_thread(Text.load, place, self._config.text)
        except (SourceError, TextInvalid) as error:
            log.error("the tokenizer %s cannot be used, so tokens are estimated: %s", source, error)
        except Exception:
            log.exception("the tokenizer %s cannot be read, so tokens are estimated", source)

    async def _watch(self) -> None:
        """Probes each of them when its time has come."""
        probing: set[asyncio.Task[None]] = set()
        try:
            while True:
                now = self._clock.now()
                probed = {name: server for name, server in self._servers.items() if server.known.terms.probe_s}
                for name, server in probed.items():
                    every_s = server.known.terms.probe_s
                    if now - self._probed_at.setdefault(name, now) >= every_s:
                        self._probed_at[name] = now
                        task = asyncio.create_task(self._probe(server))
                        probing.add(task)
                        task.add_done_callback(probing.discard)
                if probed:
                    await self._clock.sleep(LOOK_S)
                else:
                    self._followed.clear()
                    await self._followed.wait()
        finally:
            for task in probing:
                task.cancel()

    async def _probe(self, server: Server) -> None:
        try:
            server.probed(await self._client.is_there(server.known))
        except Exception:
            log.exception("upstream %s cannot be probed", server.name)
        for pool in self.pools():
            pool.changed()


def _draining() -> errors.Draining:
    return errors.Draining("This server is shutting down.", retry_after_s=1.0)
