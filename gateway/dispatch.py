"""All models that are served here: whose request goes in front of which model, and as what.

What a model's requests and workers do with each other is ``line``'s.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway import errors
from gateway.adapters import Adapter, Board
from gateway.clock import Clock
from gateway.flight import Flight
from gateway.lanes import LaneView
from gateway.line import Line
from gateway.seat import Seat
from gateway.workers import COMMAND, Worker, child_of, socket_directory
from policies import settings, wire
from policies.priority import Order
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
    ready: bool


class Dispatch:
    """All models that are served here, by name."""

    def __init__(self, config: settings.Settings, clock: Clock, command: Sequence[str] = COMMAND) -> None:
        """``command`` starts a worker process; its settings follow as JSON."""
        self.draining = False
        """New requests are refused; running ones finish."""
        self._config = config
        self._clock = clock
        self._command = command
        self._created = int(time.time())
        self._lines = {
            name: Line(name, model, config.classes, clock, self._look_around, config.workers)
            for name, model in config.models.items()
        }
        self._adapters: dict[str, Adapter] = {}
        """By name; of models that are served."""
        self._texts: dict[str, Text] = {}
        self._workers: list[Worker] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._first: asyncio.Future[None] | None = None

    def serve(self, name: str, text: Text) -> None:
        """Starts, or connects to, the workers of a model of the settings."""
        model = self._config.models[name]
        self._texts[name] = text
        for index in range(model.replicas):
            if self._sockets is None:
                self._sockets = socket_directory()
            address = f"unix:{self._sockets.name}/{len(self._workers)}"
            child = child_of(name, model, index, address)
            self._seat(name, child.name, address, child)
        for address in model.addresses:
            self._seat(name, f"{name}@{address}", address, None)

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
        await asyncio.gather(*(worker.close(drain_s) for worker in self._workers))
        if self._sockets is not None:
            self._sockets.cleanup()

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(name, self._created, name in self._texts and line.ready() is not None)
            for name, line in self._lines.items()
        ]

    def adapters(self) -> list[ServedModel]:
        """Each as a model of its own."""
        return [
            ServedModel(name, adapter.loaded_at, self._line(name).ready() is not None)
            for name, adapter in self._adapters.items()
        ]

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
        """Has its model's workers read it, until ``end_trial``. Raises AdapterRefused, NobodyThere, ModelNotFound."""
        return await self._line(adapter.model).adapters.tried(adapter)

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
            raise _unavailable(model)
        return text

    def ready(self, model: str) -> wire.Ready:
        """The facts of one of its ready workers. Raises ModelNotFound, ModelUnavailable."""
        facts = self._line(model).ready()
        if facts is None:
            raise _unavailable(model)
        return facts

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
        policy, classes = caller.policy, self._config.classes
        name = policy.sla_class
        if service_tier is not None:
            name = class_for(policy, classes, SAME_AS.get(service_tier, service_tier))
        if name not in classes:  # it was there when the policy was written
            name = max(classes, key=lambda name: classes[name].priority)
        num_each = min(max_completion_tokens, self._config.limits.completion_estimate)
        deadline_at = self._clock.now() + classes[name].ttft_ms / 1e3
        return Order(caller.tenant_id, name, policy.weight, num_prompt_tokens, num_sequences * num_each, deadline_at)

    def priority_of(self, order: Order) -> int:
        """That of its class: smaller goes first."""
        return self._config.classes[order.sla_class].priority

    def tier_of(self, order: Order) -> str:
        """The ``service_tier`` that the answer names: the one that served it."""
        return self._config.classes[order.sla_class].service_tier or DEFAULT_TIER

    def submit(self, model: str, submit: wire.Submit, order: Order) -> Flight:
        """Sends it to a worker or lets it wait in line. ``order`` may be one for several prompts together.

        Raises ModelNotFound, QueueFull, SlowDown, Draining.
        """
        if self.draining:
            raise errors.Draining("This server is shutting down.", retry_after_s=1.0)
        num_prompt_tokens = len(submit.prompt_token_ids)
        if num_prompt_tokens != order.num_prompt_tokens:
            order = msgspec.structs.replace(order, num_prompt_tokens=num_prompt_tokens)
        if adapter_id := self.adapter_id(model):
            submit = msgspec.structs.replace(submit, adapter=adapter_id)
        return self._line(model).submit(submit, order)

    def queues(self) -> list[LaneView]:
        """Each class of each model, live."""
        return [view for line in self._lines.values() for view in line.views()]

    def rest(self, worker: Worker, is_resting: bool) -> None:
        """A worker that rests is given nothing new and finishes what it has."""
        for line in self._lines.values():
            if worker in line.seats:
                line.rest(worker, is_resting)

    def workers(self) -> Sequence[Worker]:
        """Every place for a worker, also those that are empty at the moment."""
        return self._workers

    def workers_of(self, model: str) -> list[Worker]:
        """Its places. Raises ModelNotFound."""
        return list(self._line(model).seats)

    def num_waiting(self) -> int:
        """Requests in all lines."""
        return sum(line.num_waiting for line in self._lines.values())

    def cut(self) -> None:
        """Ends every flight with Draining."""
        for line in self._lines.values():
            line.cut(errors.Draining("This server is shutting down."))

    def _line(self, model: str) -> Line:
        adapter = self._adapters.get(model)
        line = self._lines.get(model if adapter is None else adapter.model)
        if line is None:
            raise errors.ModelNotFound.named(model)
        return line

    def _seat(self, model: str, name: str, address: str, child: settings.WorkerSettings | None) -> None:
        line = self._lines[model]
        worker = Worker(name, address, line, self._config.workers, self._clock, child, self._command)
        # A worker of our own serves nobody else; of the others we know no more at first than how many of us there are.
        num_gateways = self._config.server.processes if child is None else 1
        line.seats[worker] = Seat(worker, line.priorities, line.shares, num_gateways)
        self._workers.append(worker)
        worker.start()

    def _look_around(self) -> None:
        """Something changed: can anybody answer now, or will nobody ever?"""
        for name, line in list(self._lines.items()):
            if name in self._texts and not line.seats:
                del self._lines[name]
        if self._first is None or self._first.done():
            return
        if any(model.ready for model in self.models()):
            self._first.set_result(None)
        elif not self._lines:
            self._first.set_exception(NothingToServe())


def _unavailable(model: str) -> errors.ModelUnavailable:
    return errors.ModelUnavailable(
        f"The model '{model}' cannot answer at the moment. Please try again.", retry_after_s=1.0
    )
