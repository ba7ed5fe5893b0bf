"""The models of a gateway whose workers are another process's: who decides there which of them are in memory.

While requests for a model are here, or were a moment ago, it is leased (see ``leases``); without a lease they wait in
its line, which takes as long as it takes to ask. What the owner tells is where its workers are and how it stands.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gateway import errors
from gateway.clock import Clock
from gateway.leases import Change, Changed, Lease, Owner, Return, Standing, ToGateway, Verb
from gateway.line import Line
from gateway.memory import Need
from gateway.resident import SETTLE_S, InUse, Model, NotOurs, Residents
from policies import settings

FAULTS = {"not_ours": NotOurs, "in_use": InUse}


class Leased(Model):
    """A model, as this gateway has it."""

    line: Line
    lease = 0
    """The number of ours, asked for or granted; 0: none."""
    places: frozenset[str] = frozenset()
    """Where its workers are that we are connected to."""
    is_hopeless = False


class Lodging(Residents[Leased]):
    """All that are served here. Those with workers elsewhere are always there, and need no lease."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        lines: Mapping[str, Line],
        owner: Owner,
        seat: Callable[[str, str], None],
        unseat: Callable[[str], Coroutine[Any, Any, None]],
        changed: Callable[[], None],
    ) -> None:
        """``seat`` connects to a model's worker at an address; ``unseat`` gives all of them nothing more, and what it
        returns leaves them; ``changed`` is called when a model stands otherwise."""
        super().__init__(config, clock)
        self._lines = lines
        self._send = owner.send
        self._seat = seat
        self._unseat = unseat
        self._changed = changed
        self._read: set[str] = set()
        self._standings: dict[str, Standing] = {}
        self._numbers = itertools.count(1)
        self._changes: dict[int, asyncio.Future[Changed]] = {}
        owner.follow(self.told)

    def add(self, name: str, need: Need | None, measure: Callable[[], Need] | None = None) -> None:
        """From now on it is served, as soon as the owner tells of it; who also knows what it needs."""
        self._read.add(name)
        self._meet(name)

    def told(self, message: ToGateway) -> None:
        """By the owner."""
        match message:
            case Standing():
                self._standings[message.model] = message
                self._meet(message.model)
            case Changed(number):
                if (answered := self._changes.get(number)) is not None and not answered.done():
                    answered.set_result(message)

    def is_hopeless(self, name: str) -> bool:
        """It was to be loaded at the start, and cannot be."""
        model = self._models.get(name)
        return model is not None and model.is_hopeless

    def used(self, name: str) -> None:
        model = self._models.get(name)
        if model is not None and model.is_ours:
            model.used_at = self._clock.now()
            if not model.lease:
                model.lease = next(self._numbers)
                self._send(Lease(name, model.lease))
                self._watch()

    def unasked(self, model: Leased) -> None:
        if model.lease and model.stage != "in" and not model.is_busy:
            self._return(model)

    async def change(self, name: str, verb: Verb) -> None:
        """An operator's. Raises NotOurs and InUse."""
        number = next(self._numbers)
        answered = self._changes[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Change(number, name, verb))
            if fault := (await answered).fault:
                raise FAULTS[fault]
        finally:
            del self._changes[number]

    def look_around(self) -> None:
        """A worker has joined, or was given up."""
        for model in self._models.values():
            facts = model.line.ready()
            if model.stage == "in" and facts is not None:
                model.is_loading = False
                model.serve(facts)

    def _meet(self, name: str) -> None:
        """Does what follows from how the model stands, once its files are read and the owner has told of it."""
        standing = self._standings.get(name)
        if standing is None or name not in self._read:
            return
        model = self._models.get(name)
        if model is None:
            model = Leased(name, self._config.models[name], self._lines[name], None, self._clock.now())
            self._models[name] = model
            model.line.lease(not model.is_ours)
        was_in = model.stage == "in"
        self._follow(model, standing)
        if model.stage == "in":
            # It may be connected to in a moment, which is not worth a refusal.
            model.is_loading = not model.is_first_start and (model.is_loading or not was_in)
            for place in standing.places:
                if place not in model.places:
                    self._seat(name, place)
            model.places = frozenset(standing.places)
        elif was_in:
            model.is_loading, model.places = False, frozenset()
            self._run(self._unseat(name))
        is_answered = model.lease > 0 and standing.lease == model.lease
        model.line.lease(not model.is_ours or (is_answered and model.stage == "in"))
        if is_answered and model.stage != "in" and not model.is_wanted:
            self._refused(model)
        self._changed()

    def _follow(self, model: Leased, standing: Standing) -> None:
        model.stage = standing.stage
        model.is_wanted = standing.is_wanted
        model.is_first_start = standing.is_first_start
        model.is_hopeless = standing.is_hopeless
        model.is_pinned = standing.is_pinned
        model.num_bytes = standing.num_bytes
        model.began_at = standing.began_at
        model.load_s = standing.load_s
        model.failed_at = standing.failed_at
        model.no_room = standing.no_room
        self._budget = standing.budget_bytes

    def _refused(self, model: Leased) -> None:
        """It is not loaded for us."""
        no_room = model.no_room
        error: errors.GatewayError = model.cannot_be_loaded()
        if no_room is not None and no_room.is_lasting:
            error = model.too_large(no_room)
        self._return(model)
        model.fail(error)
        model.line.fail(error)

    def _return(self, model: Leased) -> None:
        model.lease = 0
        model.line.lease(False)
        self._send(Return(model.name))

    def _watch(self) -> None:
        """Looks again whether what is leased is still used."""
        if self._timer is None and not self._is_closing and any(model.lease for model in self._models.values()):
            self._timer = self._clock.call_later(SETTLE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        for model in self._models.values():
            if model.lease and model.is_busy:
                model.used_at = now
            elif model.lease and now - model.used_at >= SETTLE_S:
                self._return(model)
        self._watch()
