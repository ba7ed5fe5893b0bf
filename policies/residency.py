"""Which models are in memory: who leaves for one that is asked for, or why it cannot have room.

Bytes are what is planned, not what is measured; a model that leaves counts until its processes are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

GIBIBYTE = 1 << 30


class Resident(msgspec.Struct, frozen=True):
    """A model in memory."""

    name: str
    num_bytes: int
    used_at: float
    """When it was asked for last."""
    is_idle: bool
    """Nobody waits for it, and it answers nobody."""
    is_pinned: bool
    """It stays, whatever the others need."""


class NoRoom(msgspec.Struct, frozen=True):
    """Nobody may leave whose room would be enough."""

    needed_bytes: int
    budget_bytes: int
    busy_bytes: int
    """Of models that answer now; with less of it there may be room."""
    pinned_bytes: int

    @property
    def is_lasting(self) -> bool:
        """It does not fit beside those that are pinned, whoever else leaves."""
        return self.needed_bytes > self.budget_bytes - self.pinned_bytes

    def __str__(self) -> str:
        held = [
            f"{_shown(num_bytes)} of it are held by models that {what}"
            for num_bytes, what in ((self.pinned_bytes, "are pinned"), (self.busy_bytes, "are in use"))
            if num_bytes
        ]
        return " and ".join([f"it needs {_shown(self.needed_bytes)} of {_shown(self.budget_bytes)}", *held])


def room_for(needed_bytes: int, residents: Sequence[Resident], budget_bytes: int) -> list[str] | NoRoom:
    """Who leaves so that so much fits: idle ones, those unused for longest first, and no more of them than it takes."""
    excess = sum(resident.num_bytes for resident in residents) + needed_bytes - budget_bytes
    leaving: list[Resident] = []
    for resident in sorted(residents, key=lambda resident: resident.used_at):
        if excess <= 0:
            break
        if resident.is_idle and not resident.is_pinned and resident.num_bytes:
            leaving.append(resident)
            excess -= resident.num_bytes
    if excess > 0:
        pinned = sum(resident.num_bytes for resident in residents if resident.is_pinned)
        busy = sum(resident.num_bytes for resident in residents if not resident.is_idle and not resident.is_pinned)
        return NoRoom(needed_bytes, budget_bytes, busy, pinned)
    for resident in reversed(leaving):  # a large one that had to go may have made room for smaller ones before it
        if excess + resident.num_bytes <= 0:
            leaving.remove(resident)
            excess += resident.num_bytes
    return [resident.name for resident in leaving]


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIBIBYTE:.2f} GiB"
