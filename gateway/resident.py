"""The models that come and go, as requests see them: where each stands, what it needs, and who waits for it.

Which of them are in memory is decided by ``residence``; ``lodging`` follows what is decided in another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from gateway import errors
from gateway.clock import Clock, Timer
from gateway.lanes import LaneView
from gateway.leases import Stage
from gateway.memory import Need
from policies import settings, wire
from policies.residency import NoRoom

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "unloading", "unloaded", "failed"]
"""starting: its workers are, or are replaced; failed: it could not be loaded when somebody asked, and is tried again
when somebody asks after a while."""

SETTLE_S = 0.5
"""What was asked for so recently is not idle: who asked may be on the way from here to its line."""


class NotOurs(Exception):
    """Its workers are not started here alone, so they stay as they are."""


class InUse(Exception):
    """It answers somebody."""


class Occupancy(Protocol):
    """The workers of a model, and who uses them."""

    @property
    def seats(self) -> Collection[object]:
        """Places for workers; there are none when all were given up."""

    @property
    def num_flights(self) -> int:
        """Users that have not ended."""

    def ready(self) -> wire.Ready | None:
        """The facts of a ready worker."""


class Waiter:
    """A request that waits until its model is ready."""

    def __init__(self, sla_class: str, tenant_id: str, came_at: float) -> None:
        self.sla_class = sla_class
        self.tenant_id = tenant_id
        self.came_at = came_at
        self.ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()

    def fail(self, error: errors.GatewayError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)


class Model:
    """One of them."""

    def __init__(self, name: str, config: settings.Model, line: Occupancy, need: Need | None, now: float) -> None:
        self.name = name
        self.config = config
        self.line = line
        self.need = need
        self.measure: Callable[[], Need] | None = None
        self.is_ours = config.replicas > 0 and not config.addresses
        self.is_pinned = config.pinned
        self.stage: Stage = "out"
        self.is_wanted = False
        self.is_first_start = False
        """Loaded because the settings say so, and not ready yet: until then it is not waited for."""
        self.is_loading = False
        self.num_bytes = 0
        """Planned, while it is in memory or leaves it."""
        self.used_at = now
        self.began_at = now
        """To be loaded, or to be waited for."""
        self.load_s = 0.0
        """As it took the last time."""
        self.failed_at: float | None = None
        self.no_room: NoRoom | None = None
        """Why it has to wait for others, or would not fit."""
        self.waiters: dict[Waiter, None] = {}
        """In the order in which they came."""
        self.num_full: Counter[str] = Counter()
        """By class, those who were refused as too many waited; and below those who waited for too long."""
        self.num_too_late: Counter[str] = Counter()

    @property
    def least_bytes(self) -> int:
        return 0 if self.need is None else self.config.replicas * self.need.least_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self.waiters) or self.line.num_flights > 0

    def serve(self, facts: wire.Ready) -> None:
        """Whoever waits for it goes on."""
        for waiter in self.waiters:
            if not waiter.ready.done():
                waiter.ready.set_result(facts)

    def fail(self, error: errors.GatewayError) -> None:
        """Whoever waits for it hears this."""
        for waiter in self.waiters:
            waiter.fail(error)

    def left_s(self, now: float) -> float:
        """Until it should be ready, if it takes as long as the last time."""
        return max(1.0, self.began_at + self.load_s - now)

    def cannot_be_loaded(self, again_s: float | None = None) -> errors.ModelUnavailable:
        return errors.ModelUnavailable(f"The model '{self.name}' cannot be loaded.", retry_after_s=again_s)

    def too_large(self, answer: NoRoom) -> errors.ModelUnavailable:
        return errors.ModelUnavailable(f"There is no room for the model '{self.name}': {answer}.")

    def too_late(self, limit_s: float, now: float) -> errors.GatewayError:
        """For one that has waited so long."""
        if self.stage == "out" and self.no_room is not None:
            return errors.ModelUnavailable(
                f"There was no room for the model '{self.name}' within {limit_s:g} s: {self.no_room}.",
                retry_after_s=1.0,
            )
        return errors.QueueTimeout(
            f"The model '{self.name}' is being loaded, and was not ready within {limit_s:g} s.",
            retry_after_s=self.left_s(now),
        )


M = TypeVar("M", bound=Model)


class Residents(Generic[M]):
    """All of them, and the requests that wait for one to be loaded."""

    def __init__(self, config: settings.Settings, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._models: dict[str, M] = {}
        self._budget: int | None = None
        self._timer: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def used(self, name: str) -> None:
        """A request enters its line; it is loaded for that if it has to be."""
        raise NotImplementedError

    def unasked(self, model: M) -> None:
        """A request has left that waited for it."""
        raise NotImplementedError

    def state(self, name: str) -> State:
        model = self._models.get(name)
        if model is None:  # its files are being read
            return "starting"
        if model.stage == "in":
            return "ready" if model.line.ready() is not None else "starting"
        if model.stage == "leaving":
            return "unloading"
        return "starting" if model.is_wanted else "failed" if model.failed_at is not None else "unloaded"

    def is_pinned(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.is_pinned and model.is_ours

    def num_bytes(self, name: str) -> int:
        """As planned; 0 while it is not in memory."""
        model = self._models.get(name)
        return 0 if model is None else model.num_bytes

    @property
    def budget_bytes(self) -> int | None:
        """Of all of them; None: nothing is planned."""
        return self._budget

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a model to be loaded."""
        return sum(len(model.waiters) for model in self._models.values())

    def waiters(self) -> list[Waiter]:
        """Each of them."""
        return [waiter for model in self._models.values() for waiter in model.waiters]

    def with_waiters(self, views: list[LaneView]) -> list[LaneView]:
        """Lanes of a model, with those who come there as soon as it is loaded; until then the lanes are empty."""
        model, now = self._models.get(views[0].model), self._clock.now()
        if model is None:
            return views
        told = []
        for view in views:
            waiters = [waiter for waiter in model.waiters if waiter.sla_class == view.sla_class]
            told.append(
                msgspec.structs.replace(
                    view,
                    num_waiting=view.num_waiting + len(waiters),
                    num_tenants=max(view.num_tenants, len({waiter.tenant_id for waiter in waiters})),
                    oldest_wait_s=max(view.oldest_wait_s, *(now - waiter.came_at for waiter in waiters[:1]), 0.0),
                    num_refused_full=view.num_refused_full + model.num_full[view.sla_class],
                    num_timed_out=view.num_timed_out + model.num_too_late[view.sla_class],
                )
            )
        return told

    async def ready(self, name: str, sla_class: str, tenant_id: str) -> wire.Ready:
        """The facts of one of its workers, once it is loaded for this request. Raises ModelUnavailable, QueueFull and
        QueueTimeout; where it has the place of another one, that one hears QueueFull."""
        model = self._models.get(name)
        if model is None or (model.stage == "in" and not model.is_loading):
            raise unavailable(name)
        now, terms = self._clock.now(), self._config.classes[sla_class]
        if (again_s := self.failed_for_s(model)) > 0:
            raise model.cannot_be_loaded(max(1.0, again_s))
        others = [each for each in model.waiters if each.sla_class == sla_class and not each.ready.done()]
        if len(others) >= terms.max_waiting:
            full = errors.QueueFull(
                f"{terms.max_waiting} requests of the class '{sla_class}' wait for the model '{name}' to be loaded.",
                retry_after_s=model.left_s(now),
            )
            model.num_full[sla_class] += 1
            aside = aside_for(tenant_id, others)
            if aside is None:
                raise full
            aside.fail(full)
        waiter = Waiter(sla_class, tenant_id, now)
        limit_s = min(terms.max_wait_s, self._config.workers.start_timeout_s)

        def time_out() -> None:
            model.num_too_late[sla_class] += not waiter.ready.done()
            waiter.fail(model.too_late(limit_s, self._clock.now()))

        timer = self._clock.call_later(limit_s, time_out)
        model.waiters[waiter] = None
        try:
            self.used(name)
            return await waiter.ready
        finally:
            timer.cancel()
            del model.waiters[waiter]
            self.unasked(model)

    def failed_for_s(self, model: M) -> float:
        """Until it is tried again; 0: it may be now."""
        if model.failed_at is None:
            return 0.0
        return max(0.0, model.failed_at + self._config.workers.max_restart_backoff_s - self._clock.now())

    def cut(self, error: errors.GatewayError) -> None:
        """Nobody waits any more."""
        for model in self._models.values():
            model.fail(error)

    async def close(self) -> None:
        """Nothing is loaded from now on; what was leaving is gone."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self.cut(errors.Draining("This server is shutting down."))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a model could not be unloaded, or not be measured", exc_info=error)


def aside_for(tenant_id: str, waiters: Sequence[Waiter]) -> Waiter | None:
    """Who leaves its place to one more of this tenant, where all are taken: as in a line (``Lane.aside_for``)."""
    counts = Counter(waiter.tenant_id for waiter in waiters)
    num_own = counts[tenant_id]
    if num_own >= len(waiters) // (len(counts) + (num_own == 0)):
        return None
    most = max(counts, key=counts.__getitem__)
    return next(waiter for waiter in reversed(waiters) if waiter.tenant_id == most)


def unavailable(model: str) -> errors.ModelUnavailable:
    return errors.ModelUnavailable(
        f"The model '{model}' cannot answer at the moment. Please try again.", retry_after_s=1.0
    )
