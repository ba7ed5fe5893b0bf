"""Which models have workers at the moment: loaded at the start or when somebody asks, unloaded when nobody does.

A model that comes and goes is one whose workers are all children of this process: the gateway, or what several gateways
have in common. Who leaves for whom is policies/residency.py's; how workers start and end is dispatch's, or crew's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gateway.clock import Clock
from gateway.leases import Standing, Verb
from gateway.memory import Need, budget_of
from gateway.resident import SETTLE_S, InUse, Model, NotOurs, Occupancy, Residents
from policies import settings
from policies.residency import GIBIBYTE, NoRoom, Resident, room_for

log = logging.getLogger(__name__)

ROOM_POLL_S = 0.25
"""How often it is looked for room that somebody waits for."""
MAX_IDLE_POLL_S = 5.0


class Residence(Residents[Model]):
    """All models that are served here."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        lines: Mapping[str, Occupancy],
        seat: Callable[[str, int], None],
        unseat: Callable[[str], Coroutine[Any, Any, None]],
        changed: Callable[[], None],
    ) -> None:
        """``seat`` starts a model's workers, each with at most so many bytes of KV (0: as its settings say);
        ``unseat`` gives them nothing more, and what it returns ends them; ``changed`` is called when a model was
        unloaded."""
        super().__init__(config, clock)
        self._lines = lines
        self._seat = seat
        self._unseat = unseat
        self._changed = changed
        self._budget = budget_of(config)
        num_own = sum(model.replicas > 0 for model in config.models.values())
        self._divides_kv = self._budget is not None and (num_own > 1 or config.memory.budget_bytes > 0)
        """Else a worker finds out by itself what it may take."""

    def add(self, name: str, need: Need | None, measure: Callable[[], Need] | None = None) -> None:
        """From now on it is served: loaded at once if the settings say so and it has room, else when it is asked for.
        ``need``: None is not planned for; where it knows of no weights, as the worker is who fetches them, ``measure``
        says it anew when they are there."""
        model = Model(name, self._config.models[name], self._lines[name], need, self._clock.now())
        model.measure = measure
        self._models[name] = model
        if not model.is_ours:
            model.is_pinned = True
            return self._enter(model, is_start=True)
        if model.config.load_at_start:
            is_forced = not self._config.memory.budget_bytes and not self._taken()  # the plan is a guess, and it alone
            if self._fits(model) or is_forced:
                self._enter(model, is_start=True)
            elif model.is_pinned:
                self._want(model)
            else:
                log.warning(
                    "model %s has no room beside the others and is loaded when it is asked for: it needs %.2f GiB",
                    *(name, model.least_bytes / GIBIBYTE),
                )
        return self._watch()

    def is_hopeless(self, name: str) -> bool:
        """It was to be loaded at the start, and cannot be."""
        model = self._models.get(name)
        return model is not None and model.stage == "in" and model.is_first_start and not model.line.seats

    # What requests do

    def used(self, name: str) -> None:
        """A request enters its line; it is loaded for that if it has to be."""
        model = self._models.get(name)
        if model is not None:
            model.used_at = self._clock.now()
            if model.stage != "in":
                self._want(model)

    def unasked(self, model: Model) -> None:
        if model.stage != "in" and not model.is_busy:
            model.is_wanted = model.is_pinned and model.is_wanted

    # What gateways do that are other processes

    def leased(self, name: str) -> None:
        """One is about to send requests there."""
        if not self.failed_for_s(self._models[name]):
            self.used(name)

    def returned(self, name: str) -> None:
        """One has none left."""
        model = self._models[name]
        model.used_at = self._clock.now()
        self.unasked(model)

    def standing(self, name: str, lease: int, places: tuple[str, ...]) -> Standing:
        """As it is told to one of them."""
        model = self._models[name]
        return Standing(
            model=name,
            lease=lease,
            places=places,
            stage=model.stage,
            is_wanted=model.is_wanted,
            is_first_start=model.is_first_start,
            is_hopeless=self.is_hopeless(name),
            is_pinned=model.is_pinned,
            num_bytes=model.num_bytes,
            budget_bytes=self._budget,
            began_at=model.began_at,
            load_s=model.load_s,
            failed_at=model.failed_at,
            no_room=model.no_room,
        )

    # What operators do

    async def change(self, name: str, verb: Verb) -> None:
        """Raises NotOurs and InUse."""
        self.do(name, verb)

    def do(self, name: str, verb: Verb) -> None:
        """Likewise."""
        match verb:
            case "load":
                self.load(name)
            case "unload":
                self.unload(name)
            case "pin" | "unpin":
                self.pin(name, verb == "pin")

    def load(self, name: str) -> None:
        """As if somebody asked for it. Raises NotOurs."""
        model = self._own(name)
        model.failed_at = None
        self.used(name)

    def unload(self, name: str) -> None:
        """Until somebody asks for it. Raises NotOurs and InUse."""
        model = self._own(name)
        if model.is_busy:
            raise InUse
        model.is_wanted = False
        if model.stage == "in":
            self._leave(model, "as it was told to")

    def pin(self, name: str, is_pinned: bool) -> None:
        """It stays, or goes as the others do. Raises NotOurs."""
        self._own(name).is_pinned = is_pinned
        self._advance()

    # What dispatch says

    def look_around(self) -> None:
        """A worker has joined, or was given up."""
        now = self._clock.now()
        for model in self._models.values():
            if model.stage != "in":
                continue
            facts = model.line.ready()
            if facts is not None:
                model.is_first_start = False
                if model.measure is not None and model.need is not None and not model.need.weights_bytes:
                    self._run(self._measured(model, model.measure))
                    model.measure = None
                if model.is_loading:
                    model.is_loading = False
                    model.load_s, model.used_at = now - model.began_at, now
                    model.failed_at = None
                model.serve(facts)
            elif not model.line.seats and model.is_first_start:
                model.num_bytes = 0
            elif not model.line.seats:
                model.failed_at = now
                model.fail(model.cannot_be_loaded())
                self._leave(model, "because it cannot be loaded")

    # Coming and going

    def _own(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None or not model.is_ours:
            raise NotOurs
        return model

    def _want(self, model: Model) -> None:
        if not model.is_wanted:
            model.is_wanted, model.began_at = True, self._clock.now()
        self._advance()

    def _advance(self) -> None:
        """Loads what is wanted, those that have waited for longest first, and makes room for it."""
        wanted = [model for model in self._models.values() if model.is_wanted and model.stage == "out"]
        promised_bytes = 0  # to those that others leave for: nobody who came later has it meanwhile
        for model in sorted(wanted, key=lambda model: model.began_at):
            if self._is_closing:
                return
            if self._fits(model, promised_bytes):
                self._enter(model)
                continue
            answer = self._no_room(model)
            if isinstance(answer, NoRoom):
                model.no_room = answer
                if answer.is_lasting:
                    model.is_wanted = False
                    model.fail(model.too_large(answer))
            else:
                promised_bytes += model.least_bytes
                for name in answer:
                    self._leave(self._models[name], f"to make room for {model.name}")
        self._watch()

    def _enter(self, model: Model, is_start: bool = False) -> None:
        kv_bytes = 0
        if model.need is not None and self._budget is not None:
            left = (self._budget - self._taken()) // max(1, model.config.replicas)
            kv_bytes = model.need.kv_bytes(left) if left >= model.need.least_bytes else model.need.max_kv_bytes
            model.num_bytes = model.config.replicas * (model.need.bare_bytes + kv_bytes)
        model.stage, model.is_wanted, model.no_room = "in", False, None
        model.is_first_start, model.is_loading = is_start, not is_start
        if not is_start:
            model.began_at = self._clock.now()
            log.info("model %s is loaded, as it was asked for", model.name)
        self._seat(model.name, kv_bytes if self._divides_kv else 0)
        self._watch()

    def _leave(self, model: Model, why: str) -> None:
        log.info("model %s is unloaded, %s", model.name, why)
        model.stage, model.is_loading, model.is_first_start = "leaving", False, False
        self._run(self._gone(model, self._unseat(model.name)))

    async def _gone(self, model: Model, ended: Coroutine[Any, Any, None]) -> None:
        await ended
        model.stage, model.num_bytes = "out", 0
        if model.failed_at is None and (model.is_busy or model.is_wanted):
            model.is_wanted, model.began_at = True, self._clock.now()
        self._changed()
        self._advance()

    async def _measured(self, model: Model, measure: Callable[[], Need]) -> None:
        need = model.need = await asyncio.to_thread(measure)
        if model.stage != "out":
            model.num_bytes += model.config.replicas * need.weights_bytes

    def _watch(self) -> None:
        """Looks again when somebody may have become idle, if it matters."""
        if self._timer is not None or self._is_closing:
            return
        idle_s = [
            model.config.idle_unload_s
            for model in self._models.values()
            if model.stage == "in" and model.config.idle_unload_s
        ]
        waits = any(model.is_wanted and model.stage == "out" for model in self._models.values())
        if idle_s or waits:
            after_s = min([MAX_IDLE_POLL_S, *(each / 10 for each in idle_s), *([ROOM_POLL_S] if waits else [])])
            self._timer = self._clock.call_later(after_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        for model in self._models.values():
            if model.stage != "in" or not model.is_ours:
                continue
            if model.is_busy or model.line.ready() is None:
                model.used_at = now
            elif (
                model.config.idle_unload_s
                and not model.is_pinned
                and now - model.used_at >= max(SETTLE_S, model.config.idle_unload_s)
            ):
                self._leave(model, f"as nobody has used it for {model.config.idle_unload_s:g} s")
        self._advance()

    # Memory

    def _taken(self) -> int:
        return sum(model.num_bytes for model in self._models.values())

    def _fits(self, model: Model, promised_bytes: int = 0) -> bool:
        """Now, and also when those that leave have gone and others have what they were promised."""
        if self._budget is None:
            return True
        staying = sum(one.num_bytes for one in self._models.values() if one.stage != "leaving")
        return max(self._taken(), staying + promised_bytes) + model.least_bytes <= self._budget

    def _no_room(self, model: Model) -> list[str] | NoRoom:
        """Who has to leave for it; those that leave already count as gone."""
        assert self._budget is not None
        now = self._clock.now()
        there = [
            Resident(
                one.name,
                one.num_bytes,
                one.used_at,
                not one.is_busy and now - one.used_at >= SETTLE_S and not one.is_loading,
                one.is_pinned,
            )
            for one in self._models.values()
            if one.stage == "in"
        ]
        return room_for(model.least_bytes, there, self._budget)
