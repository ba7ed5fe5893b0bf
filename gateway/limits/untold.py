"""What a gateway let in by itself while Redis was away, which hears of it when it is back: of windows that still
matter, counted once however often they have to be told, and of what open requests hold.

Tokens that are given back after that are not told: they stay counted until they leave their window.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.clock import Clock
from gateway.limits.memory import Meters
from gateway.limits.shared import SharedMeters
from policies import admission
from policies.admission import Grant, Rule
from policies.rate import Window

if TYPE_CHECKING:
    from gateway.limits.ticket import Ticket

AT_ONCE = 500
"""Windows told at once."""


class Untold(Meters):
    """By their rules' names, windows of what Redis has not counted."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._telling: dict[str, tuple[str, Window]] = {}
        """By an id of its own, what Redis is being told: the rule's name, and a window that does not change any more.
        Where no answer came, it may have been counted."""
        self._held: set[str] = set()
        """Open requests that were let in without Redis, and may hold their places and money there by now."""

    def count(self, rules: Sequence[Rule], grant: Grant) -> None:
        """What was granted by the gateway's own gauges."""
        windows = _windows(rules)
        admission.note(windows, self._found(windows, grant.at_ms), "", grant, grant.at_ms)
        self._look(grant.at_ms)

    def settled(self, rules: Sequence[Rule], request_id: str, unused: Sequence[tuple[int, int]], overused: int) -> bool:
        """A request is over, of whose grants so much was not used; whether it may hold something in Redis."""
        self.settle(_windows(rules), request_id, unused, overused, 0)
        may_hold = request_id in self._held
        self._held.discard(request_id)
        return may_hold

    async def tell(self, shared: SharedMeters, tickets: Mapping[str, Ticket]) -> None:
        """All of it; ``tickets``: of all open requests. Raises RedisAway; whatever Redis has not said to have heard is
        told again then."""
        now_ms = self._now_ms()
        for name, gauge in self._gauges.items():
            if isinstance(gauge, Window) and gauge.total_at(now_ms):
                self._telling[uuid.uuid4().hex] = name, gauge
        self._gauges.clear()
        due = [*self._telling.items()]
        for start in range(0, len(due), AT_ONCE):
            await asyncio.gather(*(self._tell(shared, *each) for each in due[start : start + AT_ONCE]))
        is_new = [ticket.request_id not in self._held for ticket in tickets.values() if not ticket.is_shared]
        if any(is_new) or shared.may_lack.is_set():
            await self.hold(shared, tickets, shared.may_lack.is_set())

    async def hold(self, shared: SharedMeters, tickets: Mapping[str, Ticket], holds_all: bool = False) -> None:
        """Places and money of those that were let in here, as if Redis had let them in, or of all, where it may have
        lost what they held. Raises RedisAway."""
        held: dict[str, tuple[Rule, list[tuple[str, int]]]] = {}
        for ticket in tickets.values():
            if holds_all or not ticket.is_shared:
                if not ticket.is_shared:
                    self._held.add(ticket.request_id)
                for rule, micros in ticket.held():
                    held.setdefault(rule.name, (rule, []))[1].append((ticket.request_id, micros))
        await asyncio.gather(*(shared.hold(rule, each) for rule, each in held.values()))
        for rule, holding in held.values():
            for request_id, _ in holding:
                if request_id not in tickets:  # Redis may have heard of its end before this
                    shared.left([rule], request_id)

    async def _tell(self, shared: SharedMeters, telling_id: str, told: tuple[str, Window]) -> None:
        name, window = told
        if window.total_at(now_ms := self._now_ms()):
            # Amounts of a slot count as of its end: if anything they leave the window late, and never early.
            slots, slot_ms = window.slots, window.slot_ms
            amounts = [(max(0, now_ms - (slots[at] + 1) * slot_ms), slots[at + 1]) for at in range(0, len(slots), 2)]
            await shared.add(name, slot_ms, telling_id, amounts)
        del self._telling[telling_id]


def _windows(rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.slot_ms]
