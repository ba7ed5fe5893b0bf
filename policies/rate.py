"""What a ceiling is held against: windows that slide, things held by open requests, and money of a period.

The three gauges here change in place and know no clock: every instant is an argument, in whole milliseconds of whatever
clock the caller keeps. All arithmetic is on integers, none above 2**53, so that a Redis script (whose numbers are
doubles) keeps the same gauges to the last token. How gauges and ceilings decide about a request is ``admission``'s.
"""

from __future__ import annotations

from array import array

import msgspec

NUM_SLOTS = 60
"""Slots in a window. More of them give tokens back in smaller portions; fewer cost less memory."""
MINUTE_MS = 60_000
DAY_MS = 86_400_000
LEASE_MS = 60_000
"""How long a lease holds without being renewed: what a gateway that died leaves behind is free after that."""


class Window(msgspec.Struct, gc=False):
    """What came during the last ``NUM_SLOTS`` slots, the running one, and the one that is partly out of the window.

    An amount counts for at least the length of the window and at most a slot longer, so at no moment do the last
    ``NUM_SLOTS * slot_ms`` hold more than what is counted. (A bucket that refills allows twice its ceiling across the
    window's length: full at its beginning, refilled until its end.)
    """

    slot_ms: int
    total: int = 0
    """As of the last call; ``total_at`` brings it up to date."""
    slots: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """Slot number, amount, slot number, amount and so on, oldest first, without empty slots. An array, because a
    million of them are nothing to the garbage collector."""

    def total_at(self, now_ms: int) -> int:
        """All that counts at this moment."""
        slots = self.slots
        if slots and slots[0] < now_ms // self.slot_ms - NUM_SLOTS:
            self._forget(now_ms // self.slot_ms - NUM_SLOTS)
        return self.total

    def add(self, amount: int, now_ms: int) -> None:
        """Counts ``amount`` >= 0 from now on, whether or not there is room."""
        if not amount:
            return
        self.total += amount
        slot = now_ms // self.slot_ms
        slots = self.slots
        if slots and slots[-2] >= slot:  # a clock that was set back adds to the newest
            slots[-1] += amount
        else:
            slots.append(slot)
            slots.append(amount)

    def give_back(self, amount: int, added_at_ms: int, now_ms: int) -> None:
        """Of what was added at that instant, so much was not used. What has left the window meanwhile needs no
        giving back."""
        slots, slot = self.slots, added_at_ms // self.slot_ms
        self.total_at(now_ms)
        at = len(slots) - 2
        while at >= 0 and slots[at] > slot:
            at -= 2
        if at < 0 or slots[at] != slot:
            return
        amount = min(amount, slots[at + 1])
        self.total -= amount
        slots[at + 1] -= amount
        if not slots[at + 1]:
            del slots[at : at + 2]

    def wait_ms(self, excess: int, now_ms: int) -> int:
        """Until ``excess`` >= 1 of what counts now has left; ``excess`` is at most the total."""
        slots, at = self.slots, 0
        while excess > slots[at + 1]:
            excess -= slots[at + 1]
            at += 2
        return (slots[at] + NUM_SLOTS + 1) * self.slot_ms - now_ms

    def reset_ms(self, now_ms: int) -> int:
        """Until the window is empty, if nothing more comes."""
        return (self.slots[-2] + NUM_SLOTS + 1) * self.slot_ms - now_ms if self.total_at(now_ms) else 0

    def _forget(self, first: int) -> None:
        """Drops what came before this slot."""
        slots, end = self.slots, 0
        while end < len(slots) and slots[end] < first:
            self.total -= slots[end + 1]
            end += 2
        del slots[:end]


class Leases(msgspec.Struct):
    """What open requests hold, each for ``LEASE_MS`` since it was last renewed. Instants never go back."""

    total: int = 0
    """As of the last call; ``total_at`` brings it up to date."""
    held: dict[str, tuple[int, int]] = {}
    """(instant at which it ends, amount) by request id, soonest end first."""
    none_ends_before_ms: int = 0

    def total_at(self, now_ms: int) -> int:
        """All that is held at this moment."""
        if now_ms >= self.none_ends_before_ms:
            self._end(now_ms)
        return self.total

    def hold(self, request_id: str, amount: int, now_ms: int) -> None:
        """So much more for this request, and all that it holds for the full time again."""
        _, before = self.held.pop(request_id, (0, 0))
        self.held[request_id] = (now_ms + LEASE_MS, before + amount)
        self.total += amount

    def renew(self, request_id: str, now_ms: int) -> None:
        """What it still holds, it holds for the full time again."""
        self.total_at(now_ms)
        if request_id in self.held:
            self.hold(request_id, 0, now_ms)

    def release(self, request_id: str, now_ms: int) -> None:
        """All that this request holds, if it still does."""
        self.total_at(now_ms)
        if found := self.held.pop(request_id, None):
            self.total -= found[1]

    def _end(self, now_ms: int) -> None:
        """What has not been renewed. Finding the first of a dictionary takes long where many were deleted before it, so
        it is not looked for as long as none can have ended."""
        self.none_ends_before_ms = now_ms + LEASE_MS
        ended = []
        for request_id, (until_ms, amount) in self.held.items():
            if until_ms > now_ms:
                self.none_ends_before_ms = until_ms
                break
            ended.append(request_id)
            self.total -= amount
        for request_id in ended:
            del self.held[request_id]


class Purse(msgspec.Struct):
    """A budget's money in one period, in micro-units: what is spent, and what open requests may still spend."""

    spent: int = 0
    leases: Leases = msgspec.field(default_factory=Leases)

    def total_at(self, now_ms: int) -> int:
        """Spent or set aside."""
        return self.spent + self.leases.total_at(now_ms)

    def settle(self, request_id: str, cost_micros: int, now_ms: int) -> int:
        """The request has cost so much and holds nothing more; all that is spent by now."""
        self.leases.release(request_id, now_ms)
        self.spent += cost_micros
        return self.spent


Gauge = Window | Leases | Purse
