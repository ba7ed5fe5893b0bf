"""Whose prompt is computed next: by class, then fair between tenants, then by deadline.

Between tenants of a class it is the virtual token counter of Sheng et al. (OSDI '24), in seconds: each tenant has a
count of what its prompts of this class should have taken, divided by its weight, and the smallest goes first. A tenant
that begins to have prompts is lifted to the smallest count among those that have some of the class already: idling
earns nothing, nor does standing behind a more important class. Where nobody had any, all begin anew, so what a tenant
took while nobody else wanted it costs it nothing later. So one tenant's long prompts, however many, cost the others' no
more than their part. Within one step a tenant's later prompts count as behind its earlier ones by what those would cost
(start-time fair queueing, Goyal et al., SIGCOMM '96).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Protocol, TypeVar

from policies.batching.claims import Claim, Place
from policies.costs import StepCosts

MAX_LOOKED_AT = 512
"""Of each tenant's that wait, in order: the first so many are given turns."""
MAX_REMEMBERED = 1024
"""Tenants, each once a class; past it those who have nothing to do are forgotten, and begin where the others stand."""
TOKEN_S = 1e-6
"""What a prompt token counts at least, and as long as nobody knows what it takes."""


class Waits(Protocol):
    """A sequence that waits, as far as its turn depends on it."""

    @property
    def place(self) -> Place: ...
    @property
    def tenant(self) -> bytes: ...
    @property
    def num_pending(self) -> int: ...
    @property
    def weight(self) -> float: ...


W = TypeVar("W", bound=Waits)

Party = tuple[int, bytes]
"""A class, by its priority, and a tenant that has prompts of it."""


def party_of(each: Waits | Claim) -> Party:
    return each.place[0], each.tenant


class Turns:
    """What each tenant's prompts of each class were given, for its weight."""

    def __init__(self) -> None:
        self._served: dict[Party, float] = {}
        self._active: set[Party] = set()

    def begin(self, parties: set[Party]) -> None:
        """These have prompts to compute in this step."""
        joined = parties - self._active
        if joined:
            served = self._served
            floors: dict[int, float] = {}
            for priority, tenant in parties & self._active:
                floors[priority] = min(served[priority, tenant], floors.get(priority, math.inf))
            for party in [party for party in served if party[0] not in floors]:
                del served[party]
            for party in joined:
                floor = floors.get(party[0], 0.0)
                served[party] = max(served.get(party, floor), floor)
            if len(served) > MAX_REMEMBERED:
                self._served = {party: served[party] for party in parties}
        self._active = parties

    def charge(self, party: Party, num_tokens: int, start: int, costs: StepCosts | None, weight: float = 1.0) -> None:
        """For a chunk, what it should take; ``begin`` has named the party. By less than no weight it is undone."""
        seconds = TOKEN_S * num_tokens
        if costs is not None and costs.known:
            seconds = max(seconds, costs.chunk_price.seconds(num_tokens, start))
        self._served[party] += seconds / weight

    def served(self, party: Party) -> float:
        return self._served.get(party, 0.0)

    @property
    def are_several(self) -> bool:
        """More than one has prompts."""
        return len(self._active) > 1


def in_turn(
    prefills: Sequence[tuple[int, Claim]], waiting: Sequence[W], turns: Turns | None, token_s: float
) -> Iterator[tuple[int, Claim | W]]:
    """Both, in the order in which they shall be looked at; those who wait with index -1. Both are in order of their
    places. ``token_s``: about what a prompt token takes."""
    by_place: Iterator[tuple[int, Claim | W]] = merge(
        prefills, ((-1, each) for each in waiting), key=lambda pair: pair[1].place
    )
    if turns is None or not turns.are_several:
        return by_place
    tags: dict[Party, float] = {}
    nums_waiting: dict[Party, int] = {}
    ranked = []
    for index, each in by_place:
        place, party = each.place, party_of(each)
        if index < 0:
            nums_waiting[party] = num = nums_waiting.get(party, 0) + 1
            if num > MAX_LOOKED_AT:
                continue
        tag = tags.get(party)
        if tag is None:
            tag = turns.served(party)
        ranked.append((place[0], tag, place, index, each))
        tags[party] = tag + max(token_s, TOKEN_S) * each.num_pending / each.weight
    ranked.sort()
    return ((index, each) for _, _, _, index, each in ranked)
