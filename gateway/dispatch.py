"""All models that are served here: whose request goes in front of which model, and as what.

What a model's requests and workers do with each other is ``line``'s.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway import errors
from gateway.adapters import Adapter, Board
from gateway.clock import Clock
from gateway.flight import Flight
from gateway.lanes import LaneView
from gateway.launcher import Launcher
from gateway.leases import Owner
from gateway.line import Line
from gateway.lodging import Lodging
from gateway.memory import Need
from gateway.residence import Residence
from gateway.resident import State, unavailable
from gateway.seat import Seat
from gateway.workers import LEAVE_S, Worker, child_of, socket_directory
from policies import settings, wire
from policies.priority import Order
from policies.terms import Sampling
from policies.tiers import class_for

if TYPE_CHECKING:
    from gateway.auth import Caller
    from gateway.text import Text

__all__ = ["Dispatch", "Flight", "NothingToServe", "ServedModel"]

SAME_AS = {"fast": "priority", "scale": "default"}
"""Tiers by the names that OpenAI also takes."""
DEFAULT_TIER = "default"


class NothingToServe(Exception):
    """No model can be loaded, and each has said why on standard error."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it."""

    name: str
    created: int
    """Unix seconds: when this gateway began to serve it."""
    state: State

    @property
    def ready(self) -> bool:
        """One of its workers can answer."""
        return self.state == "ready"


class Dispatch:
    """All models that are served here, by name."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        launcher: Launcher | None = None,
        owner: Owner | None = None,
    ) -> None:
        """``launcher`` starts workers; ``owner``: of all of them; None: this gateway."""
        self.draining = False
        """New requests are refused; running ones finish."""
        self._config = config
        self._clock = clock
        self._launcher = launcher or Launcher()
        self._created = int(time.time())
        self._lines = {
            name: Line(name, model, config.classes, clock, self._look_around, config.workers)
            for name, model in config.models.items()
            if owner is None or name not in owner.given_up
        }
        self._adapters: dict[str, Adapter] = {}
        """By name; of models that are served."""
        self._texts: dict[str, Text] = {}
        self._workers: dict[Worker, str] = {}
        """Each with its model's name."""
        self._resting: set[str] = set()
        """Names of workers, also of those that are not there at the moment."""
        self._numbers: dict[tuple[str, int], int] = {}
        """Of sockets, by model and replica: the same whenever it is loaded, as a process that is killed leaves its."""
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._first: asyncio.Future[None] | None = None
        common = self._unseat_all, self._look_around
        self.residence: Residence | Lodging
        """Which of them are in memory."""
        if owner is None:
            self.residence = Residence(config, clock, self._lines, self._seat_all, *common)
        else:
            self.residence = Lodging(config, clock, self._lines, owner, self._seat_at, *common)

    def serve(self, name: str, text: Text, need: Need | None = None, measure: Callable[[], Need] | None = None) -> None:
        """From now on requests can be read for this model of the settings. Its workers are started or connected to, or
        wait until it is asked for. ``need``: of each worker that is started here; ``measure`` as for
        ``Residence.add``."""
        self._texts[name] = text
        self.residence.add(name, need, measure)
        self._look_around()

    def give_up(self, name: str) -> None:
        """This model cannot be served at all; why is already on standard error."""
        del self._lines[name]
        self._look_around()

    async def until_ready(self) -> None:
        """Until the first model can answer. Raises NothingToServe when none ever will."""
        self._first = asyncio.get_running_loop().create_future()
        self._look_around()
        await self._first

    async def close(self, drain_s: float) -> None:
        """Ends all workers, letting them finish what they still hold for ``drain_s``."""
        for line in self._lines.values():
            line.close()
        await self.residence.close()
        await asyncio.gather(*(worker.close(drain_s) for worker in self._workers))
        if self._sockets is not None:
            self._sockets.cleanup()

    def models(self) -> list[ServedModel]:
        return [ServedModel(name, self._created, self.residence.state(name)) for name in self._lines]

    def given_up(self) -> list[str]:
        """Models of the settings that are not served; why was said when that was found."""
        return [name for name in self._config.models if name not in self._lines]

    def adapters(self) -> list[ServedModel]:
        """Each as a model of its own."""
        return [
            ServedModel(name, adapter.loaded_at, self.residence.state(adapter.model))
            for name, adapter in self._adapters.items()
        ]

    def state(self, model: str) -> State:
        """Raises ModelNotFound."""
        return self.residence.state(self._line(model).name)

    def follow(self, board: Board) -> None:
        """These adapters are served from now on; requests under way go on with what they began with."""
        known = board.adapters.values()
        self._adapters = {
            adapter.name: adapter
            for adapter in known
            if adapter.model in self._lines and adapter.name not in self._config.models
        }
        for model, line in self._lines.items():
            line.adapters.follow(adapter for adapter in self._adapters.values() if adapter.model == model)

    async def try_adapter(self, adapter: Adapter) -> wire.AdapterLoaded:
        """Has its model's workers read it, until ``end_trial``; a model that is not loaded is loaded first, for as long
        as a request of the most important class would wait. Raises AdapterRefused, NobodyThere, and what ``loaded``
        raises."""
        line = self._line(adapter.model)
        if line.ready() is None:
            classes = self._config.classes
            await self.residence.ready(line.name, min(classes, key=lambda name: classes[name].priority), "")
        return await line.adapters.tried(adapter)

    def end_trial(self, adapter: Adapter) -> None:
        """They keep it if it is served by now."""
        line = self._lines.get(adapter.model)
        if line is not None:
            line.adapters.give_up(adapter)

    def adapter_id(self, model: str) -> str:
        """What its weights are called; empty where it is no adapter."""
        adapter = self._adapters.get(model)
        return "" if adapter is None else adapter.adapter_id

    def text(self, model: str) -> Text:
        """Raises ModelNotFound, and ModelUnavailable while its files are being read."""
        text = self._texts.get(self._line(model).name)
        if text is None:
            raise unavailable(model)
        return text

    def ready(self, model: str) -> wire.Ready | None:
        """The facts of one of its ready workers. Raises ModelNotFound."""
        return self._line(model).ready()

    async def loaded(self, model: str, caller: Caller, service_tier: str | None) -> wire.Ready:
        """As ``ready``, for a request that asks for this tier: an unloaded model is loaded for it, and it waits as long
        as its class waits in line. Raises ModelNotFound, ModelUnavailable, QueueFull and QueueTimeout."""
        if self.draining:
            raise _draining()
        sla_class = self._class_of(caller, service_tier)
        return await self.residence.ready(self._line(model).name, sla_class, caller.tenant_id)

    def order(
        self,
        caller: Caller,
        service_tier: str | None,
        num_prompt_tokens: int,
        max_completion_tokens: int,
        num_sequences: int = 1,
    ) -> Order:
        """What the line has to know of a request that asks for this tier and for so many tokens a sequence.

        None and "auto" are the policy's own class; a tier that the policy does not allow becomes the nearest one that
        it does and that is less important, else the policy's own.
        """
        name, classes = self._class_of(caller, service_tier), self._config.classes
        num_each = min(max_completion_tokens, self._config.limits.completion_estimate)
        deadline_at = self._clock.now() + classes[name].ttft_ms / 1e3
        return Order(
            caller.tenant_id, name, caller.policy.weight, num_prompt_tokens, num_sequences * num_each, deadline_at
        )

    def priority_of(self, order: Order) -> int:
        """That of its class: smaller goes first."""
        return self._config.classes[order.sla_class].priority

    def tier_of(self, order: Order) -> str:
        """The ``service_tier`` that the answer names: the one that served it."""
        return self._config.classes[order.sla_class].service_tier or DEFAULT_TIER

    def submit(self, model: str, submit: wire.Submit, order: Order, after: Flight | None = None) -> Flight:
        """Sends it to a worker or lets it wait in line. ``order`` may be one for several prompts together; ``after``:
        one of them that was let in, so that this one is too, and is answered by the same weights.

        Raises ModelNotFound, QueueFull, SlowDown, Draining.
        """
        if after is None:
            if self.draining:
                raise _draining()
            line, adapter_id = self._line(model), self.adapter_id(model)
        else:
            assert isinstance(after.keeper, Line)
            line, adapter_id = after.keeper, after.request.adapter
        num_prompt_tokens = len(submit.prompt_token_ids)
        if num_prompt_tokens != order.num_prompt_tokens:
            order = msgspec.structs.replace(order, num_prompt_tokens=num_prompt_tokens)
        if adapter_id:
            submit = msgspec.structs.replace(submit, adapter=adapter_id)
        self.residence.used(line.name)
        return line.submit(submit, order, after is not None)

    def misses(self, model: str, order: Order) -> bool:
        """No worker is there for this model, or its line has no room for the request, or would keep it longer than its
        class promises for the first token. Raises ModelNotFound."""
        line, terms = self._line(model), self._config.classes[order.sla_class]
        if line.ready() is None:
            return self.residence.state(line.name) != "unloaded"
        ttft_s = line.predicted_ttft_s(order)
        return ttft_s is None or ttft_s > terms.ttft_ms / 1e3

    def serves(self, model: str) -> bool:
        """It is one that workers answer for."""
        return model in self._lines or model in self._adapters

    def waits(self, model: str, order: Order, num_sequences: int) -> bool:
        """A request that came now would wait in line, before a worker has it. Raises ModelNotFound."""
        line, priority = self._line(model), self.priority_of(order)
        if line.num_waiting:
            return True
        asks = Flight(line, wire.Submit("", [], Sampling(max_tokens=1), num_sequences), order, self._clock.now())
        return not any(seat.has_room(asks, priority) for seat in line.seats.values())

    def queues(self) -> list[LaneView]:
        """Each class of each model, live."""
        return [view for line in self._lines.values() for view in self.residence.with_waiters(line.views())]

    def seated(self) -> Iterator[tuple[str, Worker, Collection[Flight]]]:
        """Each place for a worker, with its model and what it has."""
        for name, line in self._lines.items():
            for worker, seat in line.seats.items():
                yield name, worker, seat.flights.values()

    def flights(self) -> Iterator[tuple[str, Flight]]:
        """All that have not ended, each with its model."""
        return ((model, flight) for model, line in self._lines.items() for flight in line.flights())

    def rest(self, name: str, is_resting: bool) -> None:
        """A worker of this name, be it one that comes later, is given nothing new while it rests, and finishes what it
        has."""
        (self._resting.add if is_resting else self._resting.discard)(name)
        for line in self._lines.values():
            for worker in [worker for worker in line.seats if worker.name == name]:
                line.rest(worker, is_resting)

    def workers(self) -> Sequence[Worker]:
        """Every place for a worker, also those that are empty at the moment."""
        return list(self._workers)

    def workers_of(self, model: str) -> list[Worker]:
        """Its places. Raises ModelNotFound."""
        return list(self._line(model).seats)

    def num_waiting_for(self, model: str) -> int:
        """Requests in its line. Raises ModelNotFound."""
        return self._line(model).num_waiting

    def num_waiting(self) -> int:
        """Requests in all lines, and before them for a model to be loaded."""
        return sum(line.num_waiting for line in self._lines.values()) + self.residence.num_waiting

    def cut(self) -> None:
        """Ends every flight with Draining."""
        for line in self._lines.values():
            line.cut(errors.Draining("This server is shutting down."))
        self.residence.cut(_draining())

    def _line(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:  # no adapter has the name of a model
            adapter = self._adapters.get(model)
            line = None if adapter is None else self._lines.get(adapter.model)
        if line is None:
            raise errors.ModelNotFound.named(model)
        return line

    def _class_of(self, caller: Caller, service_tier: str | None) -> str:
        """As ``order`` says."""
        policy, classes = caller.policy, self._config.classes
        name = policy.sla_class
        if service_tier is not None:
            name = class_for(policy, classes, SAME_AS.get(service_tier, service_tier))
        if name not in classes:  # it was there when the policy was written
            name = max(classes, key=lambda name: classes[name].priority)
        return name

    def _seat_all(self, name: str, max_kv_bytes: int) -> None:
        """Starts, or connects to, the workers of a model, each with at most so many bytes of KV; 0: as its settings
        say."""
        models = self._config.models
        for index in range(models[name].replicas):
            if self._sockets is None:
                self._sockets = socket_directory()
            number = self._numbers.setdefault((name, index), len(self._numbers))
            address = f"unix:{self._sockets.name}/{number}"
            child = child_of(name, self._config, index, address, max_kv_bytes)
            self._seat(name, child.name, address, child)
        for address in models[name].addresses:
            self._seat_at(name, address)

    def _seat_at(self, name: str, address: str) -> None:
        """Connects to a worker of a model that was not started here."""
        self._seat(name, f"{name}@{address}", address, None)

    def _seat(self, model: str, name: str, address: str, child: settings.WorkerSettings | None) -> None:
        line = self._lines[model]
        worker = Worker(name, address, line, self._config.workers, self._clock, child, self._launcher)
        # A worker of our own serves nobody else; of the others we know no more at first than how many of us there are.
        num_gateways = self._config.server.processes if child is None else 1
        seat = line.seats[worker] = Seat(worker, line.priorities, line.shares, num_gateways)
        seat.is_open = name not in self._resting
        self._workers[worker] = model
        worker.start()

    def _unseat_all(self, name: str) -> Coroutine[Any, Any, None]:
        """The workers of a model that answers nobody are given nothing more, and then ended; requests that come
        meanwhile wait in its line."""
        line = self._lines[name]
        leaving = [worker for worker, model in self._workers.items() if model == name]
        for worker in leaving:
            if worker in line.seats:
                line.rest(worker, True)
        return self._end(line, leaving)

    async def _end(self, line: Line, leaving: list[Worker]) -> None:
        await asyncio.gather(*(worker.close(LEAVE_S) for worker in leaving))
        for worker in leaving:
            line.unseat(worker)
            self._workers.pop(worker, None)

    def _look_around(self) -> None:
        """Something changed: can anybody answer now, or will nobody ever?"""
        self.residence.look_around()
        for name in [name for name in self._lines if self.residence.is_hopeless(name)]:
            del self._lines[name]
        if self._first is None or self._first.done():
            return
        states = {model.state for model in self.models()}
        if "ready" in states or ("unloaded" in states and "starting" not in states):
            self._first.set_result(None)
        elif not self._lines:
            if self._config.upstreams:
                self._first.set_result(None)
            else:
                self._first.set_exception(NothingToServe())


def _draining() -> errors.Draining:
    return errors.Draining("This server is shutting down.", retry_after_s=1.0)
