"""Budgets outlast the gateway: what the ledger knows to be spent counts after a restart, and after Redis lost it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from decimal import Decimal

import msgspec
import pytest

from gateway import store
from gateway.bootstrap import bootstrap
from gateway.directory import Directory
from gateway.errors import BudgetSpent, RequestsLimited
from gateway.limits import Limits
from gateway.limits.budgets import LOOK_S, Budgets
from gateway.posted import Posted
from gateway.redis import Redis
from policies import admission, settings
from policies.policy import Budget, Policy, Price
from policies.terms import Usage
from tests.builders import PATIENCE_S, a_caller, until
from tests.conftest import PATIENT_MS
from tests.gateway.limited import spend
from tests.residents import add_tenant, add_version, change

MIDNIGHT = admission.period_of("day", 1_795_000_000).starts_at
NOON = MIDNIGHT + 43_200
POLICY = Policy(budget=Budget(Decimal("0.001"), "day"), prices={"*": Price(request=Decimal("0.0001"))})
"""Ten requests a day, a hundred micro-units each."""

UNREADABLE = "what is spent of the budgets cannot be read from the ledger"

numbers = itertools.count()


@pytest.fixture
async def rooms(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        await add_version(rooms, "thrifty", POLICY)
        yield rooms


@contextlib.asynccontextmanager
async def gateway(rooms, clock, redis=None, alert=lambda alert: None):
    """A gateway's limits and budgets, beginning at noon."""
    directory = await Directory.load(rooms, clock)
    limits = Limits(settings.Settings(), clock, redis, wall=lambda: NOON)
    budgets = Budgets(rooms, directory, limits, clock, asyncio.Event(), alert, lambda: NOON)
    async with limits.watched(), budgets.watched():
        yield limits, directory


async def spent(limits, tenant_id):
    (reading,) = await limits.peek(POLICY, tenant_id)
    return reading.used


async def ask(limits, tenant_id):
    async with limits.admit(a_caller(POLICY, tenant_id), "demo", 1, 1, f"r{next(numbers)}") as ticket:
        ticket.settle(Usage(1, 0, 1))


async def ask_in_vain(limits, tenant_id):
    """Raises BudgetSpent. Until Redis has heard what the last one cost, its money is only set aside."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(RequestsLimited):
                await ask(limits, tenant_id)
            await asyncio.sleep(0.01)


async def test_a_restart_forgets_nothing_that_was_spent_in_the_period(rooms, clock):
    one, other = await add_tenant(rooms, "north", "thrifty"), await add_tenant(rooms, "south", "thrifty")
    for tenant_id, micros, at in [
        (one, 600, NOON - 60),
        (one, 200, NOON),
        (one, 5000, NOON - 86_400),
        (other, 7, NOON),
    ]:
        await spend(rooms, tenant_id, micros, at)
    await spend(rooms, one, 100, MIDNIGHT, named_at=MIDNIGHT - 600)
    await spend(rooms, one, 100, NOON, kind="corr")  # which is billed, and no use of anything
    async with gateway(rooms, clock) as (limits, _):
        assert (await spent(limits, one), await spent(limits, other)) == (900, 7)
        await ask(limits, one)
        with pytest.raises(BudgetSpent):
            await ask(limits, one)


async def test_a_budget_that_is_new_to_a_tenant_begins_with_what_it_spent_before(rooms, clock):
    tenant = await add_tenant(rooms, "north", "default")
    await spend(rooms, tenant, 900, NOON - 60)
    async with gateway(rooms, clock) as (limits, directory):
        assert await spent(limits, tenant) == 0
        await change(rooms, store.tenants, tenant, policy="thrifty")
        await directory.refresh()
        clock.advance(LOOK_S)
        await until(lambda: limits.local.readings(limits.plans.find(a_caller(POLICY, tenant), "").rules) == [900, 0])


@pytest.mark.parametrize("budget", [None, Budget(Decimal(1), "week")])
async def test_what_was_under_way_when_its_tenant_got_a_budget_counts_too(rooms, clock, budget):
    tenant = await add_tenant(rooms, "north", "default")
    caller = a_caller(Policy(prices=POLICY.prices, budget=budget), tenant)
    async with gateway(rooms, clock) as (limits, directory):
        async with limits.admit(caller, "demo", 1, 1, "r") as ticket:
            await change(rooms, store.tenants, tenant, policy="thrifty")
            await directory.refresh()
            clock.advance(LOOK_S)
            await until(lambda: tenant in limits.periods)
            await spend(rooms, tenant, ticket.settle(Usage(1, 0, 1)), NOON)
        clock.advance(LOOK_S)
        await until(lambda: limits.local.readings(limits.plans.find(a_caller(POLICY, tenant), "").rules) == [100, 0])
        assert not limits.late


async def test_shares_that_nobody_was_told_of_are_told_by_the_next_start_and_once(rooms, clock):
    budget = msgspec.structs.replace(POLICY.budget, alerts_at=(0.5, 0.9, 2.0))
    await add_version(rooms, "thrifty", msgspec.structs.replace(POLICY, budget=budget), version=2)
    one, other = await add_tenant(rooms, "north", "thrifty"), await add_tenant(rooms, "south", "thrifty")
    for tenant_id, micros in ((one, 900), (other, 499)):
        await spend(rooms, tenant_id, micros, NOON)
    told = []
    async with gateway(rooms, clock, alert=told.append):
        assert [(alert.tenant_id, alert.share, alert.spent_micros) for alert in told] == [
            (one, 0.5, 900),
            (one, 0.9, 900),
        ]
    await Posted(rooms).add(told[0].id)
    await Posted(rooms).add(told[0].id)  # twice is once
    again = []
    async with gateway(rooms, clock, alert=again.append) as (_, directory):
        assert again == told[1:]
        again.clear()
        less = msgspec.structs.replace(POLICY.budget, amount=Decimal("0.0005"), alerts_at=(0.9,))
        await add_version(rooms, "thrifty", msgspec.structs.replace(POLICY, budget=less), version=3)
        await directory.refresh()
        clock.advance(LOOK_S)
        await until(lambda: len(again) == 2)
        assert {(alert.tenant_id, alert.share, alert.amount_micros) for alert in again} == {
            (one, 0.9, 500),
            (other, 0.9, 500),
        }


async def test_a_hard_budget_is_told_to_be_spent_once_it_refuses_whatever_small_rest_there_is(rooms, clock):
    budget = msgspec.structs.replace(POLICY.budget, amount=Decimal("0.00095"), alerts_at=(0.8, 1.0, 1.5))
    await add_version(rooms, "thrifty", msgspec.structs.replace(POLICY, budget=budget), version=2)
    tenant, other = await add_tenant(rooms, "north", "thrifty"), await add_tenant(rooms, "south", "thrifty")
    for tenant_id in (tenant, other):
        await spend(rooms, tenant_id, 900, NOON)
    told = []
    async with gateway(rooms, clock, alert=told.append) as (limits, directory):
        caller = a_caller(directory.policy("thrifty").policy, tenant)
        for _ in range(2):
            with pytest.raises(BudgetSpent):
                async with limits.admit(caller, "demo", 1, 1, "r"):
                    pass
            await until(lambda: clock.advance(LOOK_S) or not limits.refused)
    shares = [(alert.tenant_id, alert.share, alert.spent_micros) for alert in told]
    assert sorted(shares[:2]) == sorted([(tenant, 0.8, 900), (other, 0.8, 900)])
    assert {*shares[2:]} == {(tenant, 0.8, 900), (tenant, 1.0, 900)}  # what nobody has taken is told again, by its id
    assert len({alert.id for alert in told}) == 3


async def test_a_budget_that_refuses_again_and_again_is_told_of_without_a_look_at_all_others(rooms, clock, monkeypatch):
    """There may be one of every key."""
    tenant = await add_tenant(rooms, "north", "thrifty")
    await spend(rooms, tenant, 1000, NOON)
    directory, told = await Directory.load(rooms, clock), []
    limits = Limits(settings.Settings(), clock, wall=lambda: NOON)
    budgets = Budgets(rooms, directory, limits, clock, asyncio.Event(), told.append, lambda: NOON)
    await budgets.restore()
    num_told = len(told)
    for name in ("tenants", "budgeted_keys"):
        monkeypatch.setattr(directory, name, None)
    for _ in range(2):
        with pytest.raises(BudgetSpent):
            await ask(limits, tenant)
        await budgets.tell_refused()
    assert [(alert.tenant_id, alert.share) for alert in told[num_told:]] == [(tenant, 0.8), (tenant, 1.0)]


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_redis_that_lost_everything_is_told_again_once_it_is_back(rooms, clock, fragile_redis):
    tenant = await add_tenant(rooms, "north", "thrifty")
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=2.0), clock)
    async with gateway(rooms, clock, redis) as (limits, _):
        for _ in range(3):
            await ask(limits, tenant)
        await limits.shared.close()
        assert await spent(limits, tenant) == 300
        fragile_redis.kill()
        for _ in range(4):
            await ask(limits, tenant)  # by itself
            await spend(rooms, tenant, 100, NOON)
        await spend(rooms, tenant, 300, NOON)  # what was spent before, as its rows say
        fragile_redis.start()
        clock.advance(2.0)
        async with asyncio.timeout(PATIENCE_S):
            while await spent(limits, tenant) != 700:
                clock.advance(LOOK_S)
        for _ in range(3):
            await ask(limits, tenant)
        with pytest.raises(BudgetSpent):
            await ask_in_vain(limits, tenant)
    await redis.close()


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_what_was_let_in_without_redis_is_counted_there_when_it_ends_after_its_return(
    rooms, clock, fragile_redis
):
    tenant = await add_tenant(rooms, "north", "thrifty")
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=2.0), clock)
    async with gateway(rooms, clock, redis) as (limits, _):
        await spend(rooms, tenant, 300, NOON)
        fragile_redis.kill()
        async with limits.admit(a_caller(POLICY, tenant), "demo", 1, 1, "long") as ticket:
            fragile_redis.start()
            clock.advance(2.0)
            async with asyncio.timeout(PATIENCE_S):
                while await spent(limits, tenant) != 300 + 100 or limits.shared.may_lack.is_set():  # which it holds
                    clock.advance(LOOK_S)
            ticket.settle(Usage(1, 0, 1))
        await limits.shared.close()
        assert await spent(limits, tenant) == 400
        assert limits.known(POLICY, tenant)[0].used == 400
    await redis.close()


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
@pytest.mark.parametrize("is_readable", [True, False])
async def test_a_redis_that_lost_everything_while_nobody_asked_is_told_again(rooms, clock, redis, is_readable, caplog):
    tenant = await add_tenant(rooms, "north", "thrifty")
    await spend(rooms, tenant, 900, NOON)
    async with gateway(rooms, clock, redis) as (limits, _):
        assert await spent(limits, tenant) == 900
        if not is_readable:  # the ledger, at first
            await rename(rooms, "ledger", "away")
        await redis.call("FLUSHALL")
        if not is_readable:
            clock.advance(LOOK_S)
            await until(lambda: UNREADABLE in caplog.text)
            await rename(rooms, "away", "ledger")
        async with asyncio.timeout(PATIENCE_S):
            while await spent(limits, tenant) != 900:
                clock.advance(LOOK_S)
        await ask(limits, tenant)
        with pytest.raises(BudgetSpent):
            await ask_in_vain(limits, tenant)


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_redis_that_made_room_of_a_budget_is_told_again(rooms, clock, redis):
    tenant = await add_tenant(rooms, "north", "thrifty")
    await spend(rooms, tenant, 700, NOON)
    async with gateway(rooms, clock, redis) as (limits, _):
        assert await spent(limits, tenant) == 700
        (rule,) = limits.plans.find(a_caller(POLICY, tenant), "demo").rules
        assert await redis.call("DEL", redis.key("limits:" + rule.name)) == 1  # as with maxmemory
        await ask(limits, tenant)
        await spend(rooms, tenant, 100, NOON)
        await limits.shared.close()
        async with asyncio.timeout(PATIENCE_S):
            while await spent(limits, tenant) != 800:
                clock.advance(LOOK_S)
        for _ in range(2):
            await ask(limits, tenant)
        with pytest.raises(BudgetSpent):
            await ask_in_vain(limits, tenant)


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_gateway_that_has_heard_what_is_spent_lets_nobody_in_on_a_redis_that_lost_it(rooms, clock, redis):
    tenant = await add_tenant(rooms, "north", "thrifty")
    await spend(rooms, tenant, 700, NOON)
    async with gateway(rooms, clock, redis) as (limits, _):
        await ask(limits, tenant)
        async with limits.admit(a_caller(POLICY, tenant), "demo", 1, 1, "long") as ticket:
            await limits.shared.close()
            await redis.call("FLUSHALL")
            ticket.settle(Usage(1, 0, 1))
        await limits.shared.close()
        assert await spent(limits, tenant) == 900
        await redis.call("FLUSHALL")
        await ask(limits, tenant)
        await limits.shared.close()
        await redis.call("FLUSHALL")
        with pytest.raises(BudgetSpent):
            await ask(limits, tenant)
        assert await spent(limits, tenant) == 1000


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_what_redis_missed_is_told_again_when_the_ledger_can_be_read(rooms, clock, redis, caplog):
    tenant = await add_tenant(rooms, "north", "thrifty")
    async with gateway(rooms, clock, redis) as (limits, _):
        await spend(rooms, tenant, 900, NOON)  # and Redis was away when it was settled
        await rename(rooms, "ledger", "away")
        limits.shared.may_lack.set()
        clock.advance(LOOK_S)
        await until(lambda: UNREADABLE in caplog.text)
        await rename(rooms, "away", "ledger")
        async with asyncio.timeout(PATIENCE_S):
            while await spent(limits, tenant) != 900:
                clock.advance(LOOK_S)


async def rename(rooms, name, other):
    """A table of the store."""
    async with rooms.engine.begin() as connection:
        await connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO {other}")


async def test_a_ledger_that_cannot_be_read_is_read_when_it_can(rooms, clock, caplog):
    tenant = await add_tenant(rooms, "north", "default")
    await spend(rooms, tenant, 900, NOON - 60)
    async with gateway(rooms, clock) as (limits, directory):
        await change(rooms, store.tenants, tenant, policy="thrifty")
        await directory.refresh()
        await rename(rooms, "ledger", "away")
        clock.advance(LOOK_S)
        await until(lambda: UNREADABLE in caplog.text)
        await rename(rooms, "away", "ledger")

        def is_restored():
            clock.advance(LOOK_S)
            return limits.local.readings(limits.plans.find(a_caller(POLICY, tenant), "").rules) == [900, 0]

        await until(is_restored)
