"""Gateways that share a Redis: how many there are, what they report, and how they hear of a change."""

from __future__ import annotations

import asyncio
import contextlib
import time

from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.gateways import LIVE_S, SILENT_S, Gateways
from gateway.log_level import Asked
from gateway.redis import Redis, RedisAway
from policies import settings
from tests import builders
from tests.builders import PATIENCE_S, a_submit, answer, dispatching, send, until
from tests.conftest import PATIENT_MS
from tests.ports import free_port


class Ears:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.num_heard = 0

    def __call__(self) -> None:
        self.num_heard += 1


@contextlib.asynccontextmanager
async def gathered(redis_settings, *ears, num_expected=1):
    """As many gateways as ears, each with its own connections."""
    clock = Clock()
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number, changed in enumerate(ears):
            redis = Redis(redis_settings, clock)
            stack.push_async_callback(redis.close)
            dispatch = Dispatch(settings.Settings(models={f"model-{number}": settings.Model()}), clock)
            found.append(
                await stack.enter_async_context(Gateways(redis, clock, num_expected, dispatch, changed).opened())
            )
        yield found


async def test_a_gateway_alone_counts_itself(clock):
    async with Gateways(None, clock, 1, Dispatch(settings.Settings(), clock), Ears()).opened() as alone:
        assert alone.num_gateways == 1
        assert [report.name for report in await alone.reports()] == [alone.name]
        await alone.tell()


async def test_gateways_count_each_other_and_notice_who_leaves(redis_settings):
    async with gathered(redis_settings, Ears()) as (staying,):
        async with gathered(redis_settings, Ears(), Ears()):
            await until(lambda: staying.num_gateways == 3)
        await staying.beat()
        assert staying.num_gateways == 1


async def test_a_gateway_that_died_is_not_counted_for_long(redis_settings, redis):
    seconds, _ = await redis.call("TIME")
    for age_s, name in ((LIVE_S - 2, "lives"), (LIVE_S + 2, "silent"), (SILENT_S + 2, "dead")):
        await redis.call("ZADD", redis.key("gateways"), 1000 * (int(seconds) - int(age_s)), name)
    async with gathered(redis_settings, Ears()) as (one,):
        await one.beat()
        assert one.num_gateways == 2
        assert one.num_not_gone == 3  # what Redis does not count is divided among these


async def test_a_change_is_heard_by_all(redis_settings):
    ears = [Ears(), Ears(), Ears()]
    async with gathered(redis_settings, *ears) as (teller, *_):
        await until(lambda: all(ear.num_heard == 1 for ear in ears))  # each has looked when it began to listen
        await teller.tell()
        await until(lambda: all(ear.num_heard == 2 for ear in ears))


async def test_all_tell_their_log_from_the_level_that_one_is_asked_for(redis_settings, level_afterwards):
    async with gathered(redis_settings, Ears(), Ears()) as (one, other):
        asked = Asked("error", time.time() + 600)
        await one.log_from(asked)
        await until(lambda: one.log_level.asked == other.log_level.asked == asked)
        async with gathered(redis_settings, Ears()) as (late,):
            await until(lambda: late.log_level.asked == asked)
        await other.log_from(None)
        await until(lambda: one.log_level.asked is other.log_level.asked is None)


async def test_reports_tell_of_all_queues_with_the_own_first(redis_settings):
    async with gathered(redis_settings, Ears(), Ears(), Ears()) as (first, *others):
        for gateway in others:
            await gateway.beat()
        reports = await first.reports()
    assert reports[0].name == first.name
    assert {view.model for view in reports[0].queues} == {"model-0"}
    assert {view.model for report in reports for view in report.queues} == {"model-0", "model-1", "model-2"}


async def test_without_redis_the_last_count_stays_and_listening_begins_anew_when_it_is_back(fragile_redis):
    config = settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=0.1)
    ears = Ears()
    async with gathered(config, ears, Ears()) as (one, other):
        await until(lambda: one.num_gateways == 2 and ears.num_heard == 1)
        fragile_redis.kill()
        async with asyncio.timeout(PATIENCE_S):
            await one.beat()
            await one.tell()
            assert len(await one.reports()) == 1
        assert one.num_gateways == 2
        fragile_redis.start()
        await until(lambda: ears.num_heard == 2)
        await other.tell()


async def test_a_gateway_whose_beat_fails_beats_on(redis_settings, redis, monkeypatch, caplog):
    monkeypatch.setattr("gateway.gateways.BEAT_S", 0.05)
    async with gathered(redis_settings, Ears()) as (one,):
        await until(lambda: one.num_gateways == 1)
        await redis.call("SET", redis.key("log-level"), "of another version")
        await until(lambda: "cannot tell the others that it lives" in caplog.text)
        await redis.call("DEL", redis.key("log-level"))
        async with gathered(redis_settings, Ears()):
            await until(lambda: one.num_gateways == 2)


async def test_before_redis_was_ever_heard_as_many_are_assumed_as_the_settings_say():
    config = settings.Redis(url=f"redis://127.0.0.1:{free_port()}")
    async with gathered(config, Ears(), num_expected=4) as (one,):
        await one.beat()
        assert one.num_gateways == 4


async def test_a_worker_rests_for_all_gateways_until_it_is_told_to_work_again(redis_settings, start_scripted_worker):
    address = await start_scripted_worker("--num-tokens", 2)
    async with contextlib.AsyncExitStack() as stack:
        clock, dispatches, found = Clock(), [], []
        for _ in range(2):
            dispatch = await stack.enter_async_context(dispatching(address))
            redis = Redis(redis_settings, clock)
            stack.push_async_callback(redis.close)
            found.append(await stack.enter_async_context(Gateways(redis, clock, 1, dispatch, Ears()).opened()))
            dispatches.append(dispatch)
        (worker,) = dispatches[0].workers()
        await found[0].rest(worker.name, True)
        await until(lambda: found[1].resting == {worker.name})
        waiting = [asyncio.create_task(answer(send(dispatch, a_submit()))) for dispatch in dispatches]
        await until(lambda: all(dispatch.num_waiting() == 1 for dispatch in dispatches))
        await found[1].rest(worker.name, False)
        async with asyncio.timeout(PATIENCE_S):
            assert all(await asyncio.gather(*waiting))


async def test_a_worker_rests_at_the_gateway_alone_that_has_started_it(redis_settings):
    async with contextlib.AsyncExitStack() as stack:
        clock, dispatches, found = Clock(), [], []
        for _ in range(2):
            dispatch = await stack.enter_async_context(dispatching(replicas=1, command=builders.scripted()))
            redis = Redis(redis_settings, clock)
            stack.push_async_callback(redis.close)
            found.append(await stack.enter_async_context(Gateways(redis, clock, 1, dispatch, Ears()).opened()))
            dispatches.append(dispatch)
        await found[0].rest("scripted-0", True)
        await found[1].beat()
        assert [gateways.resting for gateways in found] == [{"scripted-0"}, set()]
        flights = [send(dispatch, a_submit()) for dispatch in dispatches]
        assert [flight.sent_at is None for flight in flights] == [True, False]
        await found[1].rest("scripted-0", False)
        await found[0].beat()
        assert flights[0].sent_at is None
        await found[0].rest("scripted-0", False)
        for flight in flights:
            await answer(flight)


async def test_a_redis_that_comes_back_empty_or_older_is_told_again_which_workers_rest(fragile_redis):
    config = settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=0.1)

    async def lost(gateway, *told_before):
        fragile_redis.kill()
        with contextlib.suppress(RedisAway):  # so that it is known to be away
            await gateway.rest("nobody", True)
        fragile_redis.start()
        redis = Redis(config, Clock())
        for command in told_before:
            await redis.call(*command)
        await redis.close()

    async with gathered(config, Ears(), Ears()) as (one, other):
        await one.rest("demo-0", True)
        await until(lambda: one.resting == other.resting == {"demo-0"})
        await lost(one)
        async with gathered(config, Ears()) as (late,):
            await until(lambda: one.resting == other.resting == late.resting == {"demo-0"})
            await other.rest("demo-1", True)
            await other.rest("demo-0", False)
            await until(lambda: one.resting == other.resting == late.resting == {"demo-1"})
            set_, number = "penstock:resting", "penstock:resting:changes"
            await lost(other, ("SADD", set_, "demo-0"), ("SET", number, 1))
            await said(one.rest, "demo-2", True)
            await until(lambda: one.resting == other.resting == late.resting == {"demo-1", "demo-2"})


async def said(rest, *change):
    """To a Redis that is back, as soon as that is noticed."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(RedisAway):
                return await rest(*change)
            await asyncio.sleep(0.01)


async def test_a_worker_rests_for_a_gateway_alone(start_scripted_worker, clock):
    async with (
        dispatching(await start_scripted_worker("--num-tokens", 2)) as dispatch,
        Gateways(None, clock, 1, dispatch, Ears()).opened() as alone,
    ):
        (worker,) = dispatch.workers()
        await alone.rest(worker.name, True)
        waiting = asyncio.create_task(answer(send(dispatch, a_submit())))
        await until(lambda: dispatch.num_waiting() == 1)
        await alone.rest(worker.name, False)
        assert await waiting
