"""Clients that disconnect, time out, half-close or trickle, a few of each; ``benchmarks.hostile_clients`` has more."""

from __future__ import annotations

from benchmarks.hostile_clients import MANNERS, visited
from tests.house import House


async def test_they_leave_nothing_behind(house: House):
    num_rounds = 6 * len(MANNERS)
    before, after, told = await visited(house, num_rounds)
    assert after == before
    assert sum(told.values()) == num_rounds
