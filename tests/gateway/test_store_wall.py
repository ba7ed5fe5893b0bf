"""Gateways on machines whose clocks differ believe the leases of one another."""

from __future__ import annotations

import time

import pytest

from gateway.clock import Clock
from gateway.responses.shelf import Shelf
from gateway.store.wall import Wall
from policies import settings
from tests.gateway.test_responses_shelf import a_response, id_of


@pytest.fixture
async def two_walls(rooms, monkeypatch):
    """Of a gateway, and of one whose clock is ahead of it by more than a lease."""
    clock, own = Clock(), time.time
    async with Wall(rooms, clock).watched() as here:
        monkeypatch.setattr(time, "time", lambda: own() + 30.0)
        async with Wall(rooms, clock).watched() as there:
            yield here, there


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)
async def test_the_wall_is_the_databases_whatever_the_machines_own_time_is(two_walls):
    here, there = two_walls
    assert abs(here() - there()) < 5.0


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)
async def test_a_response_that_another_gateway_writes_is_not_lost_because_clocks_differ(rooms, two_walls):
    ours, theirs = (Shelf(rooms, settings.Responses(), Clock(), wall) for wall in two_walls)
    await ours.put(a_response(1, background=True))
    await theirs.sweep()
    found = await ours.find("ten_1", id_of(1))
    assert found is not None
    assert found.is_open


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)
async def test_a_gateway_goes_by_it_in_all_that_others_believe(open_front, store_settings, monkeypatch):
    own = time.time
    monkeypatch.setattr(time, "time", lambda: own() + 30.0)
    async with open_front(store=store_settings) as front:
        gw = front.gw
        for wall in (gw.batches.wall, gw.responses.shelf._wall, gw.chats._wall, gw.conversations._wall):
            assert abs(wall() - own()) < 5.0


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_file_has_the_time_of_its_machine(two_walls):
    _, there = two_walls
    assert abs(there() - time.time()) < 5.0
