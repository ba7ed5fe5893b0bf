"""A seeded walk of one crew and several gateways: every message comes when chance lets it, and so do the workers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from gateway import crew as crews
from gateway import errors
from gateway.crew import Crew
from gateway.leases import ToGateway, ToOwner
from gateway.lodging import Lodging
from gateway.memory import PROCESS_BYTES, Need
from policies import settings, wire
from tests.builders import HandClock

GIB = 1 << 30
FACTS = wire.Ready("m", 64, 9, [], 8, 8, 4, "cpu", "float32", 1)


class Hired:
    """A worker without a process: it comes and goes when the walk says so."""

    def __init__(self, world: World, name: str, address: str, host: Any, *others: object, asks: bool) -> None:
        self._world = world
        self.facts: wire.Ready | None = None
        self.address = address
        self.host = host
        self.is_closing = False
        self.gone = asyncio.Event()

    def start(self) -> None:
        self._world.workers.append(self)
        self._world.num_hired += 1

    def join(self) -> None:
        self.facts = FACTS
        self.host.joined(self)

    async def close(self, drain_s: float) -> None:
        self.is_closing = True
        await self.gone.wait()
        self._world.workers.remove(self)


class Front:
    """The line of a gateway that answers when the walk says so."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.seats: list[Hired] = []
        self.num_waiting = 0
        self.num_sent = 0
        self.is_leased = True
        self.is_told = False
        """It is known whether it is leased."""

    @property
    def num_flights(self) -> int:
        return self.num_waiting + self.num_sent

    def ready(self) -> wire.Ready | None:
        return FACTS if self.seats else None

    def lease(self, is_leased: bool) -> None:
        self.is_leased, self.is_told = is_leased, True
        self.advance()

    def fail(self, error: errors.GatewayError) -> None:
        self._world.num_refused += self.num_waiting
        self.num_waiting = 0

    def advance(self) -> None:
        if self.is_leased and self.seats:
            self.num_sent += self.num_waiting
            self.num_waiting = 0


class House:
    """A gateway: its models, what is on its way to the crew, and what is on its way from there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lines = {name: Front(world, name) for name in world.config.models}
        self.up: deque[ToOwner] = deque()
        self.down: deque[ToGateway] = deque()
        self.pace = world.chance.choice([0.05, 1.0])
        """How soon it hears and is heard."""
        self.lessee = world.crew.admit(self.down.append)
        self.send = self.up.append
        self.lodging = Lodging(world.config, world.clock, self.lines, self, self._seat, self._unseat, lambda: None)  # type: ignore[arg-type]
        for name in self.lines:
            self.lodging.add(name, None)

    def follow(self, heard: Callable[[ToGateway], None]) -> None:
        self.heard = heard

    def ask(self, name: str) -> None:
        if not self.lines[name].is_told:  # it would be refused
            return
        self.lines[name].num_waiting += 1
        self.lodging.used(name)
        self.lines[name].advance()

    def _seat(self, name: str, address: str) -> None:
        there = [worker for worker in self._world.workers if worker.address == address and worker.facts is not None]
        self.lines[name].seats += there
        self.lines[name].advance()
        self.lodging.look_around()

    def _unseat(self, name: str) -> Coroutine[Any, Any, None]:
        self.lines[name].seats.clear()
        return asyncio.sleep(0)


class World:
    """A crew and its gateways, between which every message takes its time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.workers: list[Hired] = []
        self.num_hired = self.num_refused = 0
        quick = settings.Workers(max_restart_backoff_s=0.1)
        on_demand = settings.Model(load_at_start=False)
        models = {"a": on_demand, "b": settings.Model(idle_unload_s=3.0), "c": on_demand}
        self.config = settings.Settings(models=models, memory=settings.Memory(budget_bytes=9 * GIB), workers=quick)
        self.clock = HandClock()
        self.crew = Crew(self.config, self.clock, lambda: None)
        self.houses: list[House] = []

    def step(self, is_calm: bool = False) -> None:
        """One thing happens; when it is calm, nothing new begins and nothing fails."""
        chance = self.chance
        house = chance.choice(self.houses)
        line = house.lines[chance.choice("abc")]
        if not is_calm and chance.random() < 0.005:
            return self.die(house)
        match chance.choice(["up", "down", "worker", "time", "end"] if is_calm else STEPS):
            case "ask":
                house.ask(chance.choice("aabc"))
            case "end":
                line.num_sent -= line.num_sent > 0
            case "hang up":
                line.num_waiting = 0
            case "up" | "down" if not is_calm and chance.random() > house.pace:
                pass
            case "up" if house.up:
                self.crew.heard(house.lessee, house.up.popleft())
            case "down" if house.down:
                house.heard(house.down.popleft())
            case "worker" if self.workers:
                worker = chance.choice(self.workers)
                if worker.is_closing:
                    worker.gone.set()
                elif worker.facts is None and not is_calm and chance.random() < 0.2:
                    worker.host.gave_up(worker)
                    self.workers.remove(worker)
                elif worker.facts is None:
                    worker.join()
            case "time":
                self.clock.advance(chance.choice([0.01, 0.3, 1.0]))
        return None

    def die(self, house: House) -> None:
        """With all that it says and is told; another comes."""
        self.houses.remove(house)
        self.crew.leave(house.lessee)
        self.houses.append(House(self))

    def check(self) -> None:
        """Nobody's request is with a worker that leaves, no model is there twice, and all fit."""
        for line in (line for house in self.houses for line in house.lines.values() if line.num_sent):
            assert all(each in self.workers and not each.is_closing for each in line.seats), (
                f"seed {self.seed}, {line.name}"
            )
        places = [worker.address for worker in self.workers]
        assert len(places) == len(set(places)), f"seed {self.seed}"
        assert sum(map(self.crew.residence.num_bytes, "abc")) <= 9 * GIB, f"seed {self.seed}"

    @property
    def num_open(self) -> int:
        """Requests that wait or are answered."""
        return sum(line.num_flights for house in self.houses for line in house.lines.values())


STEPS = [*["ask"] * 2, *["end"] * 8, *["up", "down"] * 9, *["worker"] * 4, *["time"] * 5, "hang up"]


@pytest.mark.parametrize("seed", range(6))
async def test_however_messages_cross_no_request_meets_a_worker_that_leaves_and_each_has_its_turn(seed, monkeypatch):
    world = World(seed)
    monkeypatch.setattr(crews, "Worker", partial(Hired, world))
    await world.crew.start(dict.fromkeys("abc", lambda: Need(4 * GIB - PROCESS_BYTES - 1, 1, 0.3)))
    world.workers[0].join()
    world.houses += [House(world) for _ in range(3)]
    for _ in range(5000):
        world.step()
        await asyncio.sleep(0)
        world.check()
    assert world.num_hired > 12, f"seed {seed}: too little came and went"
    assert world.num_refused, f"seed {seed}: nothing failed to load"
    for _ in range(100_000):
        if not world.num_open:
            break
        world.step(is_calm=True)
        await asyncio.sleep(0)
        world.check()
    assert not world.num_open, f"seed {seed}"
    for house in world.houses:
        await house.lodging.close()
    for worker in world.workers:
        worker.gone.set()
    await world.crew.close(0)
