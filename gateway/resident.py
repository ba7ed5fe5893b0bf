"""One model of those that come and go: where it stands, what it needs, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from gateway import errors
from gateway.line import Line
from gateway.memory import Need
from policies import settings, wire
from policies.residency import NoRoom


class Waiter:
    """A request that waits until its model is ready."""

    def __init__(self, sla_class: str) -> None:
        self.sla_class = sla_class
        self.ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()

    def fail(self, error: errors.GatewayError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)


class Model:
    """One model of this residence."""

    def __init__(self, name: str, config: settings.Model, line: Line, need: Need | None, now: float) -> None:
        self.name = name
        self.config = config
        self.line = line
        self.need = need
        self.measure: Callable[[], Need] | None = None
        self.is_ours = config.replicas > 0 and not config.addresses
        self.is_pinned = config.pinned
        self.stage: Literal["out", "in", "leaving"] = "out"
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
        self.waiters: set[Waiter] = set()

    @property
    def least_bytes(self) -> int:
        return 0 if self.need is None else self.config.replicas * self.need.least_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self.waiters) or self.line.num_flights > 0

    def fail(self, error: errors.GatewayError) -> None:
        """Whoever waits for it hears this."""
        for waiter in self.waiters:
            waiter.fail(error)

    def left_s(self, now: float) -> float:
        """Until it should be ready, if it takes as long as the last time."""
        return max(1.0, self.began_at + self.load_s - now)

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


def unavailable(model: str) -> errors.ModelUnavailable:
    return errors.ModelUnavailable(
        f"The model '{model}' cannot answer at the moment. Please try again.", retry_after_s=1.0
    )
