"""Several models, and several gateways that use the same scripted workers: what one process decides for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gateway import errors, processes
from gateway.clock import Clock
from gateway.crew import Crew
from gateway.dispatch import Dispatch, NothingToServe
from gateway.launcher import Launcher
from gateway.leases import ToGateway, ToOwner
from gateway.memory import PROCESS_BYTES, Need
from gateway.resident import InUse, NotOurs
from policies import settings
from policies.upstreams.terms import Upstream
from tests import builders
from tests.builders import NO_TEXT, answer, tokens, until

GIB = 1 << 30
QUICK = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02)
ON_DEMAND = settings.Model(load_at_start=False)


def needs(models: dict[str, settings.Model], num_bytes: int = 4 * GIB) -> dict[str, Callable[[], Need]]:
    return dict.fromkeys(models, lambda: Need(num_bytes - PROCESS_BYTES - 1, 1, 0.3))


class Beside:
    """The way between a gateway and a crew in one process."""

    given_up = ()

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def send(self, message: ToOwner) -> None:
        again = msgspec.json.decode(msgspec.json.encode(message), type=ToOwner)
        asyncio.get_running_loop().call_soon(self._crew.heard, self.lessee, again)

    def follow(self, heard: Callable[[ToGateway], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(message: ToGateway) -> None:
            loop.call_soon(heard, msgspec.json.decode(msgspec.json.encode(message), type=ToGateway))

        self.lessee = self._crew.admit(tell)


class Houses:
    """Gateways that share a crew."""

    def __init__(self, config: settings.Settings, crew: Crew) -> None:
        self.config = config
        self.crew = crew
        self.gateways: list[Dispatch] = []
        self._ways: dict[Dispatch, Beside] = {}

    def open(self) -> Dispatch:
        way = Beside(self.crew)
        gateway = Dispatch(self.config, Clock(), owner=way)
        self._ways[gateway] = way
        self.gateways.append(gateway)
        for name in self.config.models:
            gateway.serve(name, NO_TEXT)  # type: ignore[arg-type]
        return gateway

    async def close(self, gateway: Dispatch) -> None:
        self.gateways.remove(gateway)
        await gateway.close(drain_s=0)
        self.crew.leave(self._ways[gateway].lessee)

    def pids(self, model: str) -> set[int]:
        """Of its workers, as all the gateways see them."""
        workers = [worker for gateway in self.gateways for worker in gateway.workers_of(model)]
        return {worker.facts.pid for worker in workers if worker.facts is not None}


@contextlib.asynccontextmanager
async def sharing(
    models: dict[str, settings.Model],
    *options: object,
    budget_bytes: int = 100 * GIB,
    num_gateways: int = 2,
    **sections: Any,
) -> AsyncIterator[Houses]:
    """Gateways that have been told how the models stand; each model needs 4 GiB."""
    memory = settings.Memory(budget_bytes=budget_bytes)
    config = settings.Settings(models=models, memory=memory, **{"workers": QUICK, **sections})
    houses = Houses(config, Crew(config, Clock(), lambda: None, Launcher(builders.scripted(*options))))
    try:
        await houses.crew.start(needs(models))
        for _ in range(num_gateways):
            await houses.open().until_ready()
        yield houses
    finally:
        for gateway in list(houses.gateways):
            await houses.close(gateway)
        await houses.crew.close(0)


async def ask(gateway: Dispatch, model: str, max_tokens: int = 5) -> int:
    """How many tokens came; loads the model if it has to be."""
    if gateway.ready(model) is None:
        await gateway.loaded(model, builders.a_caller(), None)
    return len(tokens(await answer(builders.send(gateway, builders.a_submit(max_tokens=max_tokens), model))))


def states(gateway: Dispatch) -> dict[str, str]:
    return {model.name: model.state for model in gateway.models()}


async def test_a_model_is_loaded_once_whichever_gateways_ask():
    async with sharing({"a": ON_DEMAND}) as houses:
        one, other = houses.gateways
        assert states(one) == states(other) == {"a": "unloaded"}
        asking = [asyncio.create_task(ask(gateway, "a")) for gateway in (one, one, other, other)]
        await until(lambda: one.num_waiting() == other.num_waiting() == 2)
        await until(lambda: states(one) == states(other) == {"a": "starting"})
        assert await asyncio.gather(*asking) == [5] * 4
        assert states(one) == states(other) == {"a": "ready"}
        assert len(houses.pids("a")) == 1


async def test_a_model_leaves_only_when_no_gateway_uses_it():
    models = {"a": settings.Model(idle_unload_s=0.1)}
    async with sharing(models, "--step-s", 0.01) as houses:
        one, other = houses.gateways
        await until(lambda: states(other) == {"a": "ready"})
        (pid,) = houses.pids("a")
        async with builders.send(one, builders.a_submit(max_tokens=100_000), "a") as busy:
            assert await ask(other, "a", max_tokens=150) == 150  # for longer than it takes to be idle
            assert await ask(other, "a") == 5
            assert not busy.finished
            assert houses.pids("a") == {pid}
            with pytest.raises(InUse):
                await other.residence.change("a", "unload")
        await until(lambda: states(one) == states(other) == {"a": "unloaded"} and not one.workers())
        assert await ask(other, "a") == 5
        assert houses.pids("a") != {pid}


async def test_one_gateways_model_makes_room_for_anothers():
    async with sharing({"a": ON_DEMAND, "b": ON_DEMAND}, budget_bytes=5 * GIB) as houses:
        one, other = houses.gateways
        assert await ask(one, "a") == 5
        assert other.residence.num_bytes("a") == one.residence.num_bytes("a") == 4 * GIB
        assert await ask(other, "b") == 5
        assert states(one) == {"a": "unloaded", "b": "ready"}
        assert (one.residence.num_bytes("a"), one.residence.budget_bytes) == (0, 5 * GIB)


async def test_nobody_is_put_out_who_answers_at_another_gateway():
    models = {"a": settings.Model(), "b": ON_DEMAND}
    limits = builders.classes(max_wait_s=0.5)
    async with sharing(models, "--step-s", 0.01, budget_bytes=5 * GIB, classes=limits) as houses:
        one, other = houses.gateways
        async with builders.send(one, builders.a_submit(max_tokens=100_000), "a") as busy:
            with pytest.raises(errors.ModelUnavailable, match=r"needs 4\.00 GiB of 5\.00 GiB .* that are in use"):
                await ask(other, "b")
            assert not busy.finished


async def test_who_asks_while_it_leaves_waits_and_has_it_loaded_again():
    async with sharing({"a": settings.Model()}) as houses:
        one, other = houses.gateways
        await until(lambda: states(other) == {"a": "ready"})
        (pid,) = houses.pids("a")
        await one.residence.change("a", "unload")
        assert states(one) == {"a": "unloading"}
        flight = builders.send(other, builders.a_submit(max_tokens=5), "a")
        assert len(tokens(await answer(flight))) == 5
        assert houses.pids("a").isdisjoint({pid})


async def test_a_model_that_cannot_be_loaded_is_said_to_be_so_at_each_gateway_and_tried_again_later():
    async with sharing({"a": ON_DEMAND}, "--exit-at-start", 2) as houses:
        one, other = houses.gateways
        asking = [asyncio.create_task(ask(gateway, "a")) for gateway in (one, one, other)]
        for each in asking:
            with pytest.raises(errors.ModelUnavailable, match="cannot be loaded"):
                await each
        await until(lambda: states(one) == states(other) == {"a": "failed"})
        with pytest.raises(errors.ModelUnavailable, match="cannot be loaded"):
            await ask(other, "a")


async def test_what_was_to_be_loaded_at_the_start_and_cannot_be_is_served_by_none_and_takes_no_room():
    models = {"a": settings.Model(), "b": ON_DEMAND}
    async with sharing(models, "--exit-at-start", 2, budget_bytes=5 * GIB) as houses:
        await until(lambda: all(states(gateway) == {"b": "unloaded"} for gateway in houses.gateways))
        with pytest.raises(errors.ModelUnavailable, match="cannot be loaded"):
            await ask(houses.gateways[0], "b")


async def test_what_never_fits_is_refused_at_once_with_numbers():
    async with sharing({"a": ON_DEMAND}, budget_bytes=3 * GIB) as houses:
        for gateway in houses.gateways:
            with pytest.raises(errors.ModelUnavailable, match=r"it needs 4\.00 GiB of 3\.00 GiB"):
                await ask(gateway, "a")


async def test_a_gateway_that_ends_lets_go_of_what_it_used_and_the_next_one_is_told_how_things_stand():
    async with sharing({"a": ON_DEMAND, "b": ON_DEMAND}, "--step-s", 0.01, budget_bytes=5 * GIB) as houses:
        one, other = houses.gateways
        assert await ask(one, "a") == 5
        builders.send(one, builders.a_submit(max_tokens=100_000), "a")
        asking = asyncio.create_task(ask(other, "b"))
        await until(lambda: other.num_waiting() == 1)
        await houses.close(one)
        assert await asking == 5
        assert states(houses.open()) == {"a": "starting", "b": "starting"}  # it has heard nothing yet
        assert await ask(other, "a") == 5
        third = houses.gateways[-1]
        await until(lambda: states(third) == {"a": "ready", "b": "unloaded"})
        assert await ask(third, "a") == 5


async def test_operators_load_pin_and_unload_for_all_gateways(start_scripted_worker):
    models = {"a": ON_DEMAND, "far": settings.Model(replicas=0, addresses=(await start_scripted_worker(),))}
    async with sharing(models) as houses:
        one, other = (gateway.residence for gateway in houses.gateways)
        await one.change("a", "load")
        assert one.state("a") == "starting"
        await other.change("a", "pin")
        assert one.is_pinned("a")
        await until(lambda: one.state("a") == other.state("a") == "ready")
        await other.change("a", "unload")
        await until(lambda: one.state("a") == other.state("a") == "unloaded")
        await until(lambda: one.state("far") == other.state("far") == "ready")
        with pytest.raises(NotOurs):
            await one.change("far", "unload")
        assert await ask(houses.gateways[0], "far") == 5


async def test_where_no_model_can_be_read_several_gateways_may_still_have_upstreams():
    far = Upstream(name="far-1", model="far", url="https://host/v1")
    nowhere = settings.Settings(models={"a": settings.Model(source="nowhere/at/all")})
    for config in (nowhere, settings.Settings()):
        served, needs = await processes._that_can_be_served(msgspec.structs.replace(config, upstreams=(far,)))
        assert (served.models, needs) == ({}, {})
        with pytest.raises(NothingToServe):
            await processes._that_can_be_served(config)
