"""Ceilings of a day outlast the gateway and Redis: what the ledger has of the last day counts after a restart."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from gateway import store
from gateway.auth import Auth
from gateway.bootstrap import bootstrap
from gateway.directory import Directory
from gateway.errors import TokensLimited
from gateway.ledger import writer_for
from gateway.limits import Limits
from gateway.limits.budgets import Budgets
from gateway.limits.shared import MARK
from gateway.redis import Redis
from policies import settings
from policies.policy import Limits as Ceilings
from policies.policy import Policy
from policies.rate import DAY_MS, NUM_SLOTS
from policies.terms import Usage
from tests.builders import an_entry
from tests.residents import add_key, add_tenant, add_version

NOW = 1_795_000_000
DAY_S, SLOT_S = DAY_MS // 1000, DAY_MS // NUM_SLOTS // 1000
LIMITED = Policy(
    limits=Ceilings(tokens_per_day=1000),
    key_limits=Ceilings(tokens_per_day=600),
    model_limits={"small": Ceilings(tokens_per_day=100)},
)

numbers = itertools.count()


@pytest.fixture
async def rooms(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        await add_version(rooms, "limited", LIMITED)
        yield rooms


async def use(rooms, caller, num_tokens, ago_s=0, **others):
    """A row of the ledger."""
    writer = writer_for(rooms)
    row = an_entry(
        request_id=f"req_{(1000 * (NOW - ago_s) << 80) + next(numbers):032x}",
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        created_at=NOW - ago_s,
        num_prompt_tokens=num_tokens - 1,
        num_completion_tokens=1,
        **others,
    )
    await writer.write([row])
    await writer.close()


async def caller_of(rooms, clock, tenant_id, **restrictions):
    """Who asks with a new key."""
    key = await add_key(rooms, tenant_id, **restrictions)
    caller = Auth(await Directory.load(rooms, clock)).caller(key)
    assert caller is not None
    return caller


async def started(rooms, clock, redis=None):
    """The limits of a gateway that has just begun."""
    limits = Limits(settings.Settings(), clock, redis, wall=lambda: NOW)
    directory = await Directory.load(rooms, clock)
    async with Budgets(rooms, directory, limits, clock, asyncio.Event(), print, lambda: NOW).watched():
        return limits


async def used(limits, caller, model="demo"):
    """By scope, of the ceilings of a day that a request is held against."""
    rules = limits.plans.find(caller, model).rules
    readings = await limits.readings(rules)
    return {rule.scope: readings[2 * i] for i, rule in enumerate(rules) if rule.limit == "tokens_per_day"}


async def test_a_restart_forgets_no_tokens_of_the_last_day(rooms, clock):
    tenant = await add_tenant(rooms, "north", "limited")
    one, other = [await caller_of(rooms, clock, tenant) for _ in range(2)]
    await use(rooms, one, 500)
    await use(rooms, one, 90, 3600, model="small")
    await use(rooms, other, 300, DAY_S - 60)
    await use(rooms, other, 7, DAY_S + 2 * SLOT_S)  # no longer
    await use(rooms, other, 5000, cache="hit")  # uses no tokens of a ceiling
    limits = await started(rooms, clock)
    assert await used(limits, one) == {"tenant": 890, "key": 590}
    assert await used(limits, other, "small") == {"tenant": 890, "key": 300, "model": 90}
    with pytest.raises(TokensLimited):
        async with limits.admit(one, "demo", 10, 1, "r1"):
            pass
    async with limits.admit(other, "demo", 10, 1, "r2") as ticket:
        ticket.settle(Usage(10, 0, 1))
    assert await used(limits, other) == {"tenant": 901, "key": 311}


async def test_they_leave_a_day_after_they_were_used(rooms, clock):
    caller = await caller_of(rooms, clock, await add_tenant(rooms, "north", "limited"))
    await use(rooms, caller, 400, 3600)
    await use(rooms, caller, 100, DAY_S - 3 * SLOT_S)
    limits = await started(rooms, clock)
    clock.advance(2 * SLOT_S)
    assert (await used(limits, caller))["tenant"] == 500
    clock.advance(3 * SLOT_S)
    assert (await used(limits, caller))["tenant"] == 400
    clock.advance(DAY_S - 3600 - 5 * SLOT_S)
    assert (await used(limits, caller))["tenant"] == 400
    clock.advance(3 * SLOT_S)
    assert (await used(limits, caller))["tenant"] == 0


async def test_a_key_that_alone_is_limited_by_the_day_is_remembered_too(rooms, clock):
    tenant = await add_tenant(rooms, "south")
    narrow = await caller_of(rooms, clock, tenant, narrowing={"limits": {"tokens_per_day": 50}})
    other = await caller_of(rooms, clock, tenant)
    await use(rooms, narrow, 40)
    await use(rooms, other, 40)
    limits = await started(rooms, clock)
    assert await used(limits, narrow) == {"key": 40}
    assert await used(limits, other) == {}
    assert limits.local.num_gauges == 1


async def test_a_model_that_alone_is_limited_by_the_day_is_remembered_too(rooms, clock):
    await add_version(rooms, "small alone", Policy(model_limits={"small": Ceilings(tokens_per_day=100)}))
    caller = await caller_of(rooms, clock, await add_tenant(rooms, "west", "small alone"))
    await use(rooms, caller, 40, model="small")
    await use(rooms, caller, 30)
    limits = await started(rooms, clock)
    assert await used(limits, caller, "small") == {"model": 40}
    assert await used(limits, caller) == {}


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_with_redis_they_are_there_still_and_are_not_counted_twice(rooms, clock, redis_settings):
    caller = await caller_of(rooms, clock, await add_tenant(rooms, "north", "limited"))
    for num_used in (0, 100, 200):
        redis = Redis(redis_settings, clock)
        limits = await started(rooms, clock, redis)
        assert (await used(limits, caller))["tenant"] == num_used
        assert limits.local.num_gauges == 0
        async with limits.admit(caller, "demo", 90, 10, f"r{num_used}") as ticket:
            ticket.settle(Usage(90, 0, 10))
        await use(rooms, caller, 100)
        await limits.shared.close()
        await redis.close()


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_redis_that_lost_them_is_told_what_the_ledger_has(rooms, clock, redis):
    caller = await caller_of(rooms, clock, await add_tenant(rooms, "north", "limited"))
    directory, ago_s = await Directory.load(rooms, clock), NOW - int(time.time())
    limits = Limits(settings.Settings(), clock, redis)
    budgets = Budgets(rooms, directory, limits, clock, asyncio.Event(), print)
    await use(rooms, caller, 300, ago_s + 3600)
    await use(rooms, caller, 7, ago_s + DAY_S + 2 * SLOT_S)  # no longer
    await budgets.restore()
    async with limits.admit(caller, "demo", 90, 10, "r") as ticket:
        ticket.settle(Usage(90, 0, 10))
    await use(rooms, caller, 100, ago_s)
    await limits.shared.close()
    for lose in (("FLUSHALL",), ("DEL", redis.key(MARK))):
        await redis.call(*lose)
        await budgets.restore()
        assert await used(limits, caller) == {"tenant": 400, "key": 400}
    await use(rooms, caller, 50, ago_s)  # as one that Redis knows of already
    await budgets.restore()
    assert await used(limits, caller) == {"tenant": 400, "key": 400}
