"""Several models in one gateway, with scripted workers as its children: who is loaded, who leaves, and who waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import errors
from gateway.adapters import Adapter
from gateway.clock import Clock
from gateway.dispatch import Dispatch, NothingToServe
from gateway.gateways import Gateways
from gateway.launcher import Launcher
from gateway.memory import PROCESS_BYTES, Need
from gateway.resident import InUse, NotOurs
from policies import settings
from tests import builders
from tests.builders import NO_TEXT, answer, tokens, until

GIB = 1 << 30
QUICK = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02)


def need(num_bytes: int) -> Need:
    """Of so much in all."""
    return Need(num_bytes - PROCESS_BYTES - 1, 1, 0.3)


@contextlib.asynccontextmanager
async def serving(
    models: dict[str, settings.Model],
    *options: object,
    budget_bytes: int = 100 * GIB,
    need_bytes: int = 4 * GIB,
    clock: Clock | None = None,
    **sections: Any,
) -> AsyncIterator[Dispatch]:
    """A dispatch with these models; each needs ``need_bytes``."""
    config = settings.Settings(
        models=models, memory=settings.Memory(budget_bytes=budget_bytes), **{"workers": QUICK, **sections}
    )
    dispatch = Dispatch(config, clock or Clock(), Launcher(builders.scripted(*options)))
    try:
        for name in models:
            dispatch.serve(name, NO_TEXT, need(need_bytes))  # type: ignore[arg-type]
        yield dispatch
    finally:
        await dispatch.close(drain_s=0)


async def ask(dispatch: Dispatch, model: str, max_tokens: int = 5) -> int:
    """How many tokens came; loads the model if it has to be."""
    if dispatch.ready(model) is None:
        await dispatch.loaded(model, builders.a_caller(), None)
    return len(tokens(await answer(builders.send(dispatch, builders.a_submit(max_tokens=max_tokens), model))))


def states(dispatch: Dispatch) -> dict[str, str]:
    return {model.name: model.state for model in dispatch.models()}


ON_DEMAND = settings.Model(load_at_start=False)


async def test_a_model_is_loaded_by_the_first_who_asks_and_all_who_ask_meanwhile_wait():
    async with serving({"a": ON_DEMAND}) as dispatch:
        await dispatch.until_ready()
        assert states(dispatch) == {"a": "unloaded"}
        assert not dispatch.workers()
        asking = [asyncio.create_task(ask(dispatch, "a")) for _ in range(5)]
        await until(lambda: dispatch.num_waiting() == 5)
        assert states(dispatch) == {"a": "starting"}
        assert await asyncio.gather(*asking) == [5] * 5
        assert states(dispatch) == {"a": "ready"}
        assert len(dispatch.workers()) == 1


async def test_a_model_is_loaded_by_an_adapter_that_is_to_be_read():
    async with serving({"a": ON_DEMAND}) as dispatch:
        await dispatch.until_ready()
        adapter = Adapter("billie", "a", "billie#1", "/adapters/billie", "", 0)
        assert (await dispatch.try_adapter(adapter)).adapter == "billie#1"
        assert states(dispatch) == {"a": "ready"}


async def test_an_idle_model_is_unloaded_and_its_process_ends():
    model = settings.Model(load_at_start=False, idle_unload_s=0.6)
    async with serving({"a": model, "b": settings.Model()}) as dispatch:
        await until(lambda: states(dispatch) == {"a": "unloaded", "b": "ready"})
        assert await ask(dispatch, "a") == 5
        await until(lambda: states(dispatch)["a"] == "unloaded")
        assert states(dispatch)["b"] == "ready"
        assert [worker.name for worker in dispatch.workers()] == ["b-0"]
        assert await ask(dispatch, "a") == 5


async def test_a_model_that_comes_and_goes_leaves_no_sockets_of_workers_that_were_killed():
    async with serving({"a": ON_DEMAND}) as dispatch:
        await dispatch.until_ready()
        for _ in range(3):
            assert await ask(dispatch, "a") == 5
            os.kill(dispatch.ready("a").pid, signal.SIGKILL)
            await until(lambda: dispatch.ready("a") is None)
            await dispatch.residence.change("a", "unload")
            await until(lambda: states(dispatch) == {"a": "unloaded"})
        assert len(os.listdir(dispatch._sockets.name)) == 1


async def test_a_model_in_use_is_not_idle():
    async with serving({"a": settings.Model(idle_unload_s=0.6)}, "--step-s", 0.01) as dispatch:
        await dispatch.until_ready()
        assert await ask(dispatch, "a", max_tokens=150) == 150
        assert dispatch.workers()[0].num_lives == 1


async def test_who_asks_while_it_leaves_waits_and_has_it_loaded_again():
    async with serving({"a": settings.Model()}) as dispatch:
        await dispatch.until_ready()
        dispatch.residence.unload("a")
        assert states(dispatch) == {"a": "unloading"}
        flight = builders.send(dispatch, builders.a_submit(max_tokens=5), "a")
        assert len(tokens(await answer(flight))) == 5
        assert states(dispatch) == {"a": "ready"}


async def test_what_nobody_asks_for_any_more_when_it_has_left_stays_away():
    async with serving({"a": settings.Model()}) as dispatch:
        await dispatch.until_ready()
        dispatch.residence.unload("a")
        asking = asyncio.create_task(dispatch.loaded("a", builders.a_caller(), None))
        await until(lambda: dispatch.num_waiting() == 1)
        asking.cancel()
        await asyncio.wait([asking])
        assert states(dispatch) == {"a": "unloading"}
        await until(lambda: states(dispatch) != {"a": "unloading"})
        assert states(dispatch) == {"a": "unloaded"}


async def test_the_one_unused_for_longest_makes_room():
    models = {"a": settings.Model(), "b": settings.Model(), "c": ON_DEMAND}
    async with serving(models, budget_bytes=9 * GIB) as dispatch:
        await until(lambda: states(dispatch) == {"a": "ready", "b": "ready", "c": "unloaded"})
        await ask(dispatch, "a")
        assert await ask(dispatch, "c") == 5
        assert states(dispatch) == {"a": "ready", "b": "unloaded", "c": "ready"}


async def test_what_has_no_room_at_the_start_is_loaded_when_it_is_asked_for():
    models = {"a": settings.Model(), "b": settings.Model()}
    async with serving(models, budget_bytes=5 * GIB) as dispatch:
        await until(lambda: states(dispatch) == {"a": "ready", "b": "unloaded"})
        assert await ask(dispatch, "b") == 5
        assert states(dispatch) == {"a": "unloaded", "b": "ready"}


async def test_nobody_is_put_out_who_answers_and_the_wait_for_room_is_bounded_and_ends_with_numbers():
    models = {"a": settings.Model(), "b": ON_DEMAND}
    limits = builders.classes(max_wait_s=0.5)
    async with serving(models, "--step-s", 0.01, budget_bytes=5 * GIB, classes=limits) as dispatch:
        await dispatch.until_ready()
        async with builders.send(dispatch, builders.a_submit(max_tokens=100_000), "a") as busy:
            with pytest.raises(errors.ModelUnavailable, match=r"needs 4\.00 GiB of 5\.00 GiB .* 4\.00 GiB of it"):
                await ask(dispatch, "b")
            assert not busy.finished


async def test_who_waits_for_room_has_it_as_soon_as_somebody_has_become_idle():
    models = {"a": settings.Model(), "b": ON_DEMAND}
    async with serving(models, "--step-s", 0.01, budget_bytes=5 * GIB) as dispatch:
        await dispatch.until_ready()
        async with builders.send(dispatch, builders.a_submit(max_tokens=100_000), "a"):
            asking = asyncio.create_task(ask(dispatch, "b"))
            await until(lambda: dispatch.num_waiting() == 1)
            assert states(dispatch) == {"a": "ready", "b": "starting"}
        assert await asking == 5
        assert states(dispatch) == {"a": "unloaded", "b": "ready"}


async def test_room_that_is_made_for_one_is_not_taken_by_another_that_came_later():
    large, small = settings.Model(replicas=3, load_at_start=False), ON_DEMAND
    models = {"old": settings.Model(replicas=2), "large": large, "small": small}
    async with serving(models, budget_bytes=10 * GIB, need_bytes=3 * GIB) as dispatch:
        await dispatch.until_ready()
        first = asyncio.create_task(ask(dispatch, "large"))
        await until(lambda: states(dispatch)["old"] == "unloading")
        second = asyncio.create_task(ask(dispatch, "small"))
        assert await first == 5
        assert not second.done()
        assert await second == 5
        assert states(dispatch) == {"old": "unloaded", "large": "unloaded", "small": "ready"}


async def test_what_never_fits_is_refused_at_once_with_numbers():
    async with serving({"a": ON_DEMAND}, budget_bytes=3 * GIB) as dispatch:
        with pytest.raises(errors.ModelUnavailable, match=r"it needs 4\.00 GiB of 3\.00 GiB"):
            await ask(dispatch, "a")
        assert dispatch.num_waiting() == 0


async def test_weights_that_the_worker_fetches_are_counted_once_they_are_there():
    config = settings.Settings(
        models={"a": settings.Model(), "b": ON_DEMAND}, memory=settings.Memory(budget_bytes=5 * GIB), workers=QUICK
    )
    dispatch = Dispatch(config, Clock(), Launcher(builders.scripted()))
    try:
        dispatch.serve("a", NO_TEXT, Need(0, 1, 0.3), lambda: need(4 * GIB))  # type: ignore[arg-type]
        dispatch.serve("b", NO_TEXT, need(4 * GIB))  # type: ignore[arg-type]
        await dispatch.until_ready()
        await until(lambda: dispatch.residence.num_bytes("a") == 4 * GIB)
        assert await ask(dispatch, "b") == 5
        assert states(dispatch) == {"a": "unloaded", "b": "ready"}
    finally:
        await dispatch.close(drain_s=0)


async def test_a_pinned_model_stays():
    models = {"a": settings.Model(pinned=True, idle_unload_s=0.6), "b": ON_DEMAND}
    async with serving(models, budget_bytes=5 * GIB) as dispatch:
        await dispatch.until_ready()
        with pytest.raises(errors.ModelUnavailable, match="held by models that are pinned"):
            await ask(dispatch, "b")
        dispatch.residence.pin("a", False)
        assert await ask(dispatch, "b") == 5


async def test_a_model_that_cannot_be_loaded_is_said_to_be_so_and_tried_again_later(tmp_path):
    async with serving({"a": ON_DEMAND}, "--exit-at-start", 2) as dispatch:
        asking = [asyncio.create_task(ask(dispatch, "a")) for _ in range(3)]
        for one in asking:
            with pytest.raises(errors.ModelUnavailable, match="cannot be loaded"):
                await one
        await until(lambda: states(dispatch) == {"a": "failed"})
        assert not dispatch.workers()
        await asyncio.sleep(QUICK.max_restart_backoff_s)
        with pytest.raises(errors.ModelUnavailable, match="cannot be loaded"):
            await ask(dispatch, "a")


async def test_what_was_to_be_loaded_at_the_start_and_cannot_be_is_not_served():
    async with serving({"a": settings.Model()}, "--exit-at-start", 2) as dispatch:
        with pytest.raises(NothingToServe):
            await dispatch.until_ready()
        assert dispatch.models() == []


async def test_waiting_for_a_load_is_bounded_in_number_and_in_time(clock):
    waits = builders.classes(max_wait_s=60, max_waiting=1)
    async with serving({"a": ON_DEMAND}, "--fault", "silence", clock=clock, classes=waits) as dispatch:
        asking = asyncio.create_task(ask(dispatch, "a"))
        await until(lambda: dispatch.num_waiting() == 1)
        clock.advance(9)
        (lane,) = [view for view in dispatch.queues() if view.num_waiting]
        assert (lane.sla_class, lane.num_waiting, lane.num_tenants, lane.oldest_wait_s) == ("standard", 1, 1, 9)
        with pytest.raises(errors.QueueFull):
            await ask(dispatch, "a")
        clock.advance(51)
        with pytest.raises(errors.QueueTimeout, match="being loaded"):
            await asking
        assert sum(view.num_waiting for view in dispatch.queues()) == 0
        (lane,) = [view for view in dispatch.queues() if view.num_timed_out]
        assert (lane.sla_class, lane.num_refused_full, lane.num_timed_out) == ("standard", 1, 1)


async def test_of_those_that_wait_for_a_load_each_tenant_has_its_part():
    classes = builders.classes(max_waiting=2)
    async with serving({"a": ON_DEMAND}, "--fault", "silence", classes=classes) as dispatch:

        def asked(tenant_id: str) -> asyncio.Task[Any]:
            return asyncio.create_task(dispatch.loaded("a", builders.a_caller(tenant_id=tenant_id), None))

        flood = [asked("ten_1") for _ in range(3)]
        with pytest.raises(errors.QueueFull):
            await flood[2]
        late = asked("ten_2")
        with pytest.raises(errors.QueueFull):
            await flood[1]
        for tenant_id in ("ten_1", "ten_2"):
            with pytest.raises(errors.QueueFull):
                await asked(tenant_id)
        assert dispatch.num_waiting() == 2
        assert not flood[0].done()
        assert not late.done()
    for waiting in (flood[0], late):
        with pytest.raises(errors.Draining):
            await waiting


async def test_a_lost_worker_is_no_unloaded_one(tmp_path):
    fault = ("--fault", "die", "--after", 1, "--once", tmp_path / "once")
    async with serving({"a": settings.Model()}, *fault) as dispatch:
        await dispatch.until_ready()
        assert await ask(dispatch, "a") == 5
        assert dispatch.workers()[0].num_lives == 2
        assert states(dispatch) == {"a": "ready"}


async def test_a_worker_that_rests_still_rests_when_it_comes_back_and_works_when_it_is_told_to(clock):
    async with (
        serving({"a": settings.Model()}) as dispatch,
        Gateways(None, clock, 1, dispatch, lambda: None).opened() as alone,
    ):
        await dispatch.until_ready()
        await alone.rest("a-0", True)
        dispatch.residence.unload("a")
        await until(lambda: states(dispatch) == {"a": "unloaded"})
        dispatch.residence.load("a")
        await until(lambda: states(dispatch) == {"a": "ready"})
        flight = builders.send(dispatch, builders.a_submit(), "a")
        assert flight.worker is None
        await alone.rest("a-0", False)
        assert flight.worker is not None
        await answer(flight)


async def test_what_is_in_use_or_not_ours_is_not_unloaded(start_scripted_worker):
    models = {"a": settings.Model(), "far": settings.Model(replicas=0, addresses=(await start_scripted_worker(),))}
    async with serving(models, "--step-s", 0.01) as dispatch:
        await until(lambda: set(states(dispatch).values()) == {"ready"})
        async with builders.send(dispatch, builders.a_submit(max_tokens=1000), "a"):
            with pytest.raises(InUse):
                dispatch.residence.unload("a")
        for change in (dispatch.residence.load, dispatch.residence.unload):
            with pytest.raises(NotOurs):
                change("far")


async def test_closing_ends_whoever_waits():
    async with serving({"a": ON_DEMAND}, "--fault", "silence") as dispatch:
        asking = asyncio.create_task(ask(dispatch, "a"))
        await until(lambda: dispatch.num_waiting() == 1)
    with pytest.raises(errors.Draining):
        await asking


@pytest.mark.parametrize("seed", range(2))
async def test_whoever_asks_is_answered_and_no_more_is_in_memory_than_has_room(seed):
    """A seeded walk over three models with room for two, whose workers are shot now and then."""
    chance = random.Random(seed)
    models = dict.fromkeys("abc", ON_DEMAND)
    async with serving(models, "--step-s", 0.001, budget_bytes=9 * GIB) as dispatch:
        most = 0

        async def one(model: str) -> None:
            while True:
                try:
                    assert await ask(dispatch, model, max_tokens=20) == 20, f"seed {seed}"
                except errors.ModelUnavailable:  # its worker was shot, and the next one starts
                    await asyncio.sleep(0.01)
                else:
                    return

        asking = set()
        for _ in range(60):
            asking.add(asyncio.create_task(one(chance.choice("aaabbc"))))
            await asyncio.sleep(chance.random() * 0.1)
            ready = [worker for worker in dispatch.workers() if worker.facts is not None]
            if ready and chance.random() < 0.1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(ready).facts.pid, signal.SIGKILL)
            most = max(most, len(dispatch.workers()))
            planned = sum(dispatch.residence.num_bytes(name) for name in models)
            assert planned <= 9 * GIB, f"seed {seed}"
        await asyncio.gather(*asking)
        assert most == 2
        assert dispatch.num_waiting() == 0
