"""How many lines of all batches this gateway has under way: as many as the models' lines, the tenants' limits and the
settings leave. The judgement is ``policies.lines``; here is who asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from gateway.auth import Caller
from gateway.errors import GatewayError
from gateway.house import Gateway
from policies import lines

TICK_S = 0.05
"""So often a batch looks whether others have left room."""
LIMITED_S = 1.0
"""The longest that it waits for a limit before it looks again."""


class Course:
    """One batch's part in it."""

    def __init__(self) -> None:
        self.num_under_way = 0
        self.num_coming = 0
        """Of those: neither limits nor lines know them yet."""
        self.wants_more = False
        """It has lines that nothing of its own holds back."""


class Pace:
    """All batches of this gateway."""

    def __init__(self, gw: Gateway) -> None:
        self._gw = gw
        self._most = gw.settings.batches.max_in_flight
        self._courses: list[Course] = []
        self._moved = asyncio.Event()

    @contextlib.contextmanager
    def course(self) -> Iterator[Course]:
        """While this lasts, a batch has lines."""
        course = Course()
        self._courses.append(course)
        try:
            yield course
        finally:
            self._courses.remove(course)
            self.moved()

    def moved(self) -> None:
        """A line has ended, or something else has changed: whoever waits looks again."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self, longest_s: float = TICK_S) -> None:
        """Until something has moved, or for so long."""
        moved = self._moved
        timer = self._gw.clock.call_later(longest_s, self.moved)
        try:
            await moved.wait()
        finally:
            timer.cancel()

    def has_room(self, course: Course, model: str) -> bool:
        """For one more line of a batch that asks this model."""
        try:
            pool = self._gw.upstreams.of(model)
            num_in_line = pool.num_waiting if pool is not None else self._gw.dispatch.num_waiting_for(model)
        except GatewayError:  # there is none of this name any more, as the line will hear
            num_in_line = 0
        others = [each.num_under_way for each in self._courses if each is not course and each.wants_more]
        num_all = sum(each.num_under_way for each in self._courses)
        num_in_line += sum(each.num_coming for each in self._courses)
        return lines.may_send(num_all, self._most, course.num_under_way, others, num_in_line)

    async def limited_s(self, course: Course, caller: Caller, model: str) -> float:
        """How long to wait because lines have what is theirs of the tenant's limits; 0: they have not. Raises
        LimitsUnavailable."""
        limits = self._gw.limits
        if not limits.plans.find(caller, model, caller.policy.sla_class).rules:
            return 0.0
        for reading in await limits.peek(caller.policy, caller.tenant_id, caller.key_id, [model]):
            if reading.budget is not None:
                continue
            num_asked = 0 if reading.limit.startswith("tokens") else course.num_coming
            if reading.used + num_asked >= lines.lines_share(reading.ceiling):
                return min(LIMITED_S, max(TICK_S, reading.reset_ms / 1e3))
        return 0.0
