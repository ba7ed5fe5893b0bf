"""A model's adapters, as its line sees them: which there are, which worker has which, and when one may go.

An adapter's id never stands for other weights: one that is loaded again under its name has another id. Requests keep
the id that they were sent with, so the old one stays with the workers until the last of them has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from gateway.clock import Clock
from gateway.flight import Flight
from gateway.workers import Worker
from policies import wire

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""So long after it could not use an adapter a worker is told to read it again, if it is asked for: its files may have
been away for a moment only."""


class Adapter(msgspec.Struct, frozen=True):
    """One that is served, under a name of its own, beside its model."""

    name: str
    """As clients ask for it."""
    model: str
    adapter_id: str
    source: str
    digest: str
    """Of its files; empty: no worker has read them yet."""
    loaded_at: int
    """Unix seconds."""


def new_adapter_id(name: str) -> str:
    """For weights that are read now."""
    return f"{name}#{secrets.token_hex(8)}"


class Board(Protocol):
    """Where it is written which adapters there are to be."""

    adapters: dict[str, Adapter]
    """By name; another one whenever it has changed."""


class AdapterRefused(Exception):
    """No worker can use it, or not all can; the message is one sentence."""


class NobodyThere(Exception):
    """No worker is ready that could say whether it can be used."""


class _Trial:
    """Workers that are asked whether they can use an adapter."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.waiting = set(workers)
        self.answer: asyncio.Future[wire.AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._loaded: wire.AdapterLoaded | None = None

    def loaded(self, worker: Worker, message: wire.AdapterLoaded) -> None:
        if self._loaded is not None and self._loaded.digest != message.digest:
            return self.refused(worker, "its files are not the same on all workers")
        self._loaded = message
        return self.left(worker)

    def refused(self, worker: Worker, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(AdapterRefused(reason))

    def left(self, worker: Worker) -> None:
        self.waiting.discard(worker)
        if self.waiting or self.answer.done():
            return
        if self._loaded is None:
            self.answer.set_exception(NobodyThere())
        else:
            self.answer.set_result(self._loaded)


class Adapters:
    """Of one model."""

    def __init__(self, workers: Iterable[Worker], flights: Callable[[], Iterable[Flight]], clock: Clock) -> None:
        """``workers``: all that there are at any time, ready or not; ``flights``: the requests under way."""
        self._every_worker, self._flights, self._clock = workers, flights, clock
        self._current: dict[str, Adapter] = {}
        """By id."""
        self._retired: dict[str, Adapter] = {}
        """That requests under way may still use."""
        self._refused: dict[tuple[Worker, str], float] = {}
        """When a worker was last known not to be able to use one, or was told to try again."""
        self._trials: dict[str, _Trial] = {}

    def follow(self, adapters: Iterable[Adapter]) -> None:
        """These are all that there are to be, from now on."""
        wanted = {adapter.adapter_id: adapter for adapter in adapters}
        for adapter_id, adapter in wanted.items():
            if adapter_id not in self._current:
                self._retired.pop(adapter_id, None)
                self._current[adapter_id] = adapter
                for worker in self._workers():
                    worker.send(_load(adapter))
        for adapter_id in self._current.keys() - wanted.keys():
            self._retired[adapter_id] = self._current.pop(adapter_id)
        self.sweep()

    def sweep(self) -> None:
        """Those go that nobody uses any more."""
        if not self._retired:
            return
        used = {flight.request.adapter for flight in self._flights()}
        for adapter_id in self._retired.keys() - used:
            del self._retired[adapter_id]
            self._forget(adapter_id)

    def refuses(self, worker: Worker, adapter_id: str) -> bool:
        return (worker, adapter_id) in self._refused

    def asked(self, adapter_id: str) -> None:
        """For a request: workers that could not use it a while ago try again."""
        adapter = self._current.get(adapter_id) if self._refused else None
        if adapter is None:
            return
        now = self._clock.now()
        for worker in self._workers():
            if now - self._refused.get((worker, adapter_id), now) >= AGAIN_S:
                self._refused[worker, adapter_id] = now
                worker.send(_load(adapter))

    async def tried(self, adapter: Adapter) -> wire.AdapterLoaded:
        """What the ready workers say of it, once all have read it; they keep it until ``give_up`` or ``follow``. Raises
        AdapterRefused and NobodyThere.
        """
        workers = list(self._workers())
        if not workers:
            raise NobodyThere()
        trial = self._trials[adapter.adapter_id] = _Trial(workers)
        try:
            for worker in workers:
                worker.send(_load(adapter))
            return await trial.answer
        finally:
            del self._trials[adapter.adapter_id]

    def give_up(self, adapter: Adapter) -> None:
        """It was tried, and is not to be served after all."""
        if adapter.adapter_id not in self._current:
            self._forget(adapter.adapter_id)

    # What workers say

    def joined(self, worker: Worker) -> None:
        """It is told of all before it is sent a request."""
        for adapter in (*self._retired.values(), *self._current.values()):
            worker.send(_load(adapter))

    def heard(self, worker: Worker, message: wire.AdapterLoaded | wire.AdapterRefused) -> None:
        trial = self._trials.get(message.adapter)
        if isinstance(message, wire.AdapterLoaded):
            if self._refused.pop((worker, message.adapter), None) is not None:
                log.info("worker %s can use adapter %s again", worker.name, message.adapter)
            if trial is not None:
                trial.loaded(worker, message)
            return
        if trial is not None:
            return trial.refused(worker, message.reason)
        if message.adapter in self._current or message.adapter in self._retired:
            self._refused[worker, message.adapter] = self._clock.now()
            log.error("worker %s cannot use adapter %s: %s", worker.name, message.adapter, message.reason)

    def left(self, worker: Worker) -> None:
        self._refused = {place: at for place, at in self._refused.items() if place[0] is not worker}
        for trial in list(self._trials.values()):
            trial.left(worker)

    def _workers(self) -> list[Worker]:
        return [worker for worker in self._every_worker if worker.facts is not None]

    def _forget(self, adapter_id: str) -> None:
        self._refused = {place: at for place, at in self._refused.items() if place[1] != adapter_id}
        for worker in self._workers():
            worker.send(wire.UnloadAdapter(adapter_id))


def _load(adapter: Adapter) -> wire.LoadAdapter:
    return wire.LoadAdapter(adapter.adapter_id, adapter.source, adapter.digest)
