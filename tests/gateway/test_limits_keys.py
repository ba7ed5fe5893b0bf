"""Budgets of keys: beside their tenant's, at one gateway and at several, across restarts and rotations."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from decimal import Decimal

import msgspec
import pytest

from gateway import keys, store
from gateway.auth import Auth
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.errors import BudgetSpent, RateLimited, RequestsLimited
from gateway.limits import Limits
from gateway.limits.budgets import LOOK_S, Budgets
from gateway.redis import Redis
from gateway.restrictions import Scopes
from policies import admission, settings
from policies.policy import Budget, Narrowing, Policy, Price, narrowed
from policies.terms import Usage
from tests.builders import PATIENCE_S, a_caller, until
from tests.gateway.limited import DEMO, DOLLAR, a_policy, ask, limits_of, spend, used
from tests.redis import stalled
from tests.residents import add_key, add_tenant, add_version, change

MIDNIGHT = admission.period_of("day", 1_795_000_000).starts_at
NOON = MIDNIGHT + 43_200
POLICY = Policy(budget=Budget(Decimal("0.002"), "day"), prices={"*": Price(request=Decimal("0.0001"))})
"""Twenty requests a day, a hundred micro-units each."""
TEN = Narrowing(budget=Budget(Decimal("0.001"), "day"))

numbers = itertools.count()


def a_key(amount, tenants="1", key_id="key_1", **budget):
    """Who asks with a key that has a budget of its own."""
    policy = a_policy(budget=Budget(Decimal(tenants), "day"), price=DOLLAR)
    return a_caller(narrowed(policy, Narrowing(budget=Budget(Decimal(amount), "day", **budget))), key_id=key_id)


@pytest.fixture
def limits(clock):
    return limits_of(clock)


async def test_a_key_is_refused_by_its_own_budget_while_others_of_its_tenant_go_on(limits):
    caller, other = a_key("0.00006"), a_key("0.00006", key_id="key_2")
    await ask(limits, caller)
    with pytest.raises(BudgetSpent, match="the budget of this API key for the period is spent") as refused:
        await ask(limits, caller)
    assert refused.value.ends_at == admission.period_of("day", 1_795_000_000).ends_at
    await ask(limits, other)
    assert used(limits, other) == {"tenant budget": 120, "key budget": 60}
    assert [each.rule.name.partition("}")[2] for each in limits.refused] == ["key:key_1:budget:day:1794960000"]


async def test_a_key_is_told_what_it_spent_of_its_own_budget_and_not_what_its_tenant_did(limits):
    caller = msgspec.structs.replace(a_key("0.00006", tenants="0.00013"), scopes=Scopes(("chat.completions",)))
    await ask(limits, caller)
    with pytest.raises(BudgetSpent, match=r"Limit 0\.00006 USD, Spent 0\.00006 USD, Reserved 0\.00 USD") as own:
        await ask(limits, caller)
    assert own.value.headers()["x-ratelimit-spent-budget"] == "0.00006"
    other = msgspec.structs.replace(a_key("1", tenants="0.00013", key_id="key_2"), scopes=caller.scopes)
    await ask(limits, other)
    with pytest.raises(BudgetSpent, match=r"the budget of this project for the period is spent\. Waiting") as tenants:
        await ask(limits, other)
    assert not [name for name in tenants.value.headers() if name.startswith("x-ratelimit")]


async def test_a_key_may_spend_no_more_than_its_tenant_whatever_its_own_budget_is(limits):
    caller = a_key("5", tenants="0.00006")
    await ask(limits, caller)
    with pytest.raises(BudgetSpent, match="the budget of this project for the period is spent"):
        await ask(limits, caller)
    assert used(limits, caller) == {"tenant budget": 60, "key budget": 60}


async def test_who_is_refused_by_one_budget_leaves_nothing_at_the_other(limits):
    caller = a_key("0.0002")
    async with limits.admit(caller, DEMO, 50, 5000, "dear") as ticket:
        before = used(limits, caller)
        with pytest.raises(RequestsLimited, match="the budget of this API key for the period is set aside"):
            await ask(limits, caller)
        assert used(limits, caller) == before == {"tenant budget": 200, "key budget": 200}
        ticket.settle(Usage(50, 0, 1))
    assert used(limits, caller) == {"tenant budget": 62, "key budget": 62}


async def test_whoever_goes_away_without_an_answer_has_spent_nothing_of_either(limits):
    caller = a_key("0.001")
    with contextlib.suppress(asyncio.CancelledError):
        async with limits.admit(caller, DEMO, 50, 5000, "r"):
            raise asyncio.CancelledError
    assert used(limits, caller) == {"tenant budget": 0, "key budget": 0}


@pytest.mark.parametrize(("own", "tenants"), [("0.0003", "1"), ("1", "0.0003")])
async def test_a_stream_gets_what_the_lesser_budget_still_pays_for_to_the_token(limits, own, tenants):
    caller = a_key(own, tenants)
    async with limits.admit(caller, DEMO, 50, 5000, "r") as ticket:
        written = 0
        while ticket.covers(written + 1) or await ticket.top_up(written + 1):
            written += 1
        assert written == (300 - 50 - 10) // 2
        assert ticket.settle(Usage(50, 0, written)) == 300


async def test_a_soft_budget_of_a_key_refuses_nothing_and_tells_whose_it_is(clock):
    told = []
    limits = Limits(settings.Settings(), clock, alert=told.append)
    caller = a_key("0.0001", tenants="0.0006", hard=False, alerts_at=(0.5, 1.0))
    for number in range(10):
        await ask(limits, caller, 10, 50, f"r{number}", 20)
    assert [(alert.key_id, alert.share, alert.spent_micros, alert.hard) for alert in told] == [
        ("key_1", 0.5, 60, False),
        ("key_1", 1.0, 120, False),
        (None, 0.8, 480, True),
        (None, 1.0, 600, True),
    ]
    with pytest.raises(BudgetSpent, match="this project"):
        await ask(limits, caller)


async def test_each_budget_has_the_period_that_it_names(clock):
    now = [1_795_000_000.0]
    limits = Limits(settings.Settings(), clock, wall=lambda: now[0])
    policy = a_policy(budget=Budget(Decimal("0.00013"), "month"), price=DOLLAR)
    caller = a_caller(narrowed(policy, Narrowing(budget=Budget(Decimal("0.00006"), "day"))))
    await ask(limits, caller, request_id="a")
    with pytest.raises(BudgetSpent, match="this API key"):
        await ask(limits, caller, request_id="b")
    now[0] += 86_400
    await ask(limits, caller, request_id="c")
    assert used(limits, caller) == {"tenant budget": 120, "key budget": 60}
    now[0] += 86_400
    with pytest.raises(BudgetSpent, match="this project"):
        await ask(limits, caller, request_id="d")


# At several gateways


@contextlib.asynccontextmanager
async def sharing(redis_settings, clock=None, **options):
    redis = Redis(redis_settings, clock or Clock())
    config = settings.Settings(limits=settings.Limits(completion_estimate=100), redis=redis_settings)
    limits = Limits(config, clock or Clock(), redis, **options)
    async with limits.watched():
        yield limits
    await redis.close()


async def test_two_gateways_that_race_overspend_neither_a_key_nor_its_tenant(redis_settings):
    told, costs = [], {}
    callers = [a_key("0.04", tenants="0.1", key_id=f"key_{number}", alerts_at=(0.9,)) for number in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(sharing(redis_settings, alert=told.append)) for _ in range(2)]

        async def request(number):
            caller = callers[number % 3]  # the fourth comes when all is spent
            with contextlib.suppress(RateLimited):
                async with gateways[number // 3 % 2].admit(caller, DEMO, 100, 200, f"r{number}") as ticket:
                    written = 0
                    while written < 150 and (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                        written += 1
                    cost = ticket.settle(Usage(100, 0, written))
                    costs[caller.key_id] = costs.get(caller.key_id, 0) + cost

        for first in range(0, 600, 200):
            await asyncio.gather(*(request(number) for number in range(first, first + 200)))
            for limits in gateways:
                await limits.shared.close()
        assert all(25_000 < cost <= 40_000 for cost in costs.values())
        assert 95_000 < sum(costs.values()) <= 100_000
        for caller in callers:
            readings = await gateways[0].peek(caller.policy, caller.tenant_id, caller.key_id)
            seen = {reading.scope: reading.used for reading in readings}
            assert seen == {"tenant": sum(costs.values()), "key": costs.get(caller.key_id, 0)}
        with pytest.raises(RateLimited, match="this project"):
            await ask(gateways[0], callers[3], 2000, 2000)
    keys_told = sorted(alert.key_id for alert in told if alert.key_id is not None)
    assert keys_told == sorted(key_id for key_id, cost in costs.items() if cost >= 36_000)


@pytest.mark.parametrize("num_open", [1, 2, 3])
async def test_without_redis_a_gateway_holds_to_its_part_of_what_a_key_has_left(fragile_redis, clock, num_open):
    redis_settings = settings.Redis(url=fragile_redis.url, retry_s=2.0)
    async with sharing(redis_settings, clock, num_gateways=lambda: 3) as limits, contextlib.AsyncExitStack() as stack:
        policy = narrowed(POLICY, Narrowing(budget=Budget(Decimal("0.0006"))))
        caller = a_caller(policy)  # of which each gateway has two requests, and of its tenant's six
        for number in range(num_open):
            await stack.enter_async_context(limits.admit(caller, DEMO, 10, 10, f"open {number}"))
        with stalled(fragile_redis, limits.shared._redis):
            for number in range(num_open, 2):
                await stack.enter_async_context(limits.admit(caller, DEMO, 10, 10, f"open {number}"))
            with pytest.raises(RequestsLimited, match="this API key"):
                await stack.enter_async_context(limits.admit(caller, DEMO, 10, 10, "one too many"))
            other = a_caller(policy, key_id="key_2")
            await stack.enter_async_context(limits.admit(other, DEMO, 10, 10, "of another key"))
        assert not limits.refused


# Across restarts and rotations


@pytest.fixture
async def rooms(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        await add_version(rooms, "thrifty", POLICY)
        yield rooms


async def rotated(rooms, key, **others):
    """Its successor, as the administration makes it."""
    directory = await Directory.load(rooms, Clock())
    found = directory.key(keys.hash_of(directory.secret, key))
    terms = {"narrowing": found.restriction.narrowing} if found.restriction else {}
    return await add_key(rooms, found.tenant_id, rotated_from=found.id, **terms | others)


class Running:
    """A gateway's door, its limits and its budgets, beginning at noon."""

    def __init__(self, directory, limits, clock, told):
        self.directory, self.limits, self.told, self._clock = directory, limits, told, clock
        self._auth = Auth(directory)

    def caller(self, key):
        caller = self._auth.caller(key)
        assert caller is not None
        return caller

    async def spent(self, key):
        """Of the key's own budget."""
        caller = self.caller(key)
        readings = await self.limits.peek(caller.policy, caller.tenant_id, caller.key_id, (), caller.purse_id)
        (used,) = [reading.used for reading in readings if reading.scope == "key"]
        return used

    async def ask(self, key):
        async with self.limits.admit(self.caller(key), DEMO, 1, 1, f"r{next(numbers)}") as ticket:
            return ticket.settle(Usage(1, 0, 1))

    async def is_spent(self, key, micros):
        """Sooner or later."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.spent(key) != micros:
                self._clock.advance(LOOK_S)
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(rooms, clock, redis=None):
    directory, told = await Directory.load(rooms, clock), []
    limits = Limits(settings.Settings(), clock, redis, wall=lambda: NOON)
    budgets = Budgets(rooms, directory, limits, clock, asyncio.Event(), told.append, lambda: NOON)
    async with limits.watched(), budgets.watched():
        yield Running(directory, limits, clock, told)


async def test_a_restart_forgets_nothing_that_a_key_spent_in_the_period(rooms, clock):
    tenant = await add_tenant(rooms, "north", "thrifty")
    one, other, free = [await add_key(rooms, tenant, narrowing=terms) for terms in (TEN, TEN, Narrowing())]
    async with gateway(rooms, clock) as before:
        ids = [before.caller(key).key_id for key in (one, other, free)]
    for key_id, micros, at in [
        (ids[0], 600, NOON - 60),
        (ids[0], 200, MIDNIGHT),
        (ids[0], 5000, MIDNIGHT - 60),
        (ids[1], 300, NOON),
        (ids[2], 200, NOON),
    ]:
        await spend(rooms, tenant, micros, at, key_id=key_id)
    async with gateway(rooms, clock) as running:
        assert (await running.spent(one), await running.spent(other)) == (800, 300)
        (tenants,) = await running.limits.peek(POLICY, tenant)
        assert tenants.used == 1300
        for _ in range(2):
            await running.ask(one)
        with pytest.raises(BudgetSpent, match="this API key"):
            await running.ask(one)
        for _ in range(5):
            await running.ask(other)
        with pytest.raises(BudgetSpent, match="this project"):
            await running.ask(free)
        told = {(alert.key_id, alert.share, alert.spent_micros) for alert in running.told}
        assert told == {(ids[0], 0.8, 800)}


async def test_a_rotated_key_goes_on_with_what_those_before_it_spent(rooms, clock):
    tenant = await add_tenant(rooms, "north", "thrifty")
    first = await add_key(rooms, tenant, narrowing=TEN)
    async with gateway(rooms, clock) as running:
        first_id = running.caller(first).key_id
        for _ in range(3):
            await spend(rooms, tenant, await running.ask(first), NOON - 60, key_id=first_id)
        second = await rotated(rooms, first)
        await running.directory.refresh()
        assert await running.spent(second) == 300
        second_id = running.caller(second).key_id
        for key, key_id in ((first, first_id), (second, second_id), (second, second_id)):
            await spend(rooms, tenant, await running.ask(key), NOON - 60, key_id=key_id)
        assert await running.spent(first) == await running.spent(second) == 600
        third = await rotated(rooms, second)
        await change(rooms, store.keys, second_id, revoked_at=NOON)
        await running.directory.refresh()
        third_id = running.caller(third).key_id
        await spend(rooms, tenant, await running.ask(third), NOON - 60, key_id=third_id)
        assert await running.spent(third) == 700
    async with gateway(rooms, clock) as running:  # which has never seen the second one
        assert await running.spent(first) == await running.spent(third) == 700
        for _ in range(3):
            await running.ask(third)
        for key in (first, third):
            with pytest.raises(BudgetSpent, match="this API key"):
                await running.ask(key)


async def test_a_successor_that_alone_has_a_budget_counts_what_its_predecessor_goes_on_to_spend(rooms, clock):
    tenant = await add_tenant(rooms, "north", "default")
    await add_version(rooms, "priced", Policy(prices=POLICY.prices))
    await change(rooms, store.tenants, tenant, policy="priced")
    first = await add_key(rooms, tenant)
    async with gateway(rooms, clock) as running:
        first_id = running.caller(first).key_id
        await spend(rooms, tenant, await running.ask(first), NOON - 60, key_id=first_id)
        second = await rotated(rooms, first, narrowing=TEN)
        await running.directory.refresh()
        await running.is_spent(second, 100)
        await until(lambda: first_id in running.limits.periods)
        async with running.limits.admit(running.caller(first), DEMO, 1, 1, "r") as ticket:
            await spend(rooms, tenant, ticket.settle(Usage(1, 0, 1)), NOON - 60, key_id=first_id)
        await running.is_spent(second, 200)


async def test_what_a_key_spent_before_it_had_a_budget_counts_and_a_longer_period_counts_more(rooms, clock):
    tenant = await add_tenant(rooms, "north", "thrifty")
    key = await add_key(rooms, tenant)
    async with gateway(rooms, clock) as running:
        key_id = running.caller(key).key_id
        await spend(rooms, tenant, 400, NOON - 60, key_id=key_id)
        await spend(rooms, tenant, 300, MIDNIGHT - 60, key_id=key_id)

        async def given(budget):
            words = msgspec.json.encode(Narrowing(budget=budget)).decode()
            await change(rooms, store.keys, key_id, narrowing=words)
            await running.directory.refresh()

        await given(TEN.budget)
        await running.is_spent(key, 400)
        await given(Budget(Decimal("0.001"), "month"))
        await running.is_spent(key, 700)
        await change(rooms, store.keys, key_id, narrowing=None)
        await running.directory.refresh()
        assert [*running.directory.budgeted_keys()] == []


async def test_a_policys_budget_for_each_key_counts_what_the_period_has_cost_and_goes_on_in_successors(rooms, clock):
    tenant = await add_tenant(rooms, "north", "thrifty")
    old, own = await add_key(rooms, tenant), await add_key(rooms, tenant, narrowing=TEN)
    async with gateway(rooms, clock) as running:
        old_id = running.caller(old).key_id
        new = await rotated(rooms, old)
        for at in (NOON - 60, MIDNIGHT - 60):
            await spend(rooms, tenant, 100, at, key_id=old_id)
        default = Budget(Decimal("0.0003"), "day")
        await add_version(rooms, "thrifty", msgspec.structs.replace(POLICY, key_budget=default), version=2)
        await running.directory.refresh()
        await running.is_spent(new, 100)
        new_id = running.caller(new).key_id
        await spend(rooms, tenant, await running.ask(new), NOON - 60, key_id=new_id)
        assert await running.spent(old) == await running.spent(new) == 200
        later = await add_key(rooms, tenant)
        await running.directory.refresh()
        assert await running.spent(later) == await running.spent(own) == 0
    async with gateway(rooms, clock) as running:
        assert await running.spent(old) == await running.spent(new) == 200
        await running.ask(old)
        for key in (old, new):
            with pytest.raises(BudgetSpent, match="the budget of this API key"):
                await running.ask(key)
        for _ in range(3):
            await running.ask(later)
        with pytest.raises(BudgetSpent, match="the budget of this API key"):
            await running.ask(later)
        for _ in range(9):
            await running.ask(own)


@pytest.mark.parametrize("store_settings", ["sqlite"], indirect=True)
async def test_a_redis_that_lost_what_keys_have_spent_lets_none_spend_it_again(rooms, clock, redis):
    tenant = await add_tenant(rooms, "north", "thrifty")
    key = await add_key(rooms, tenant, narrowing=TEN)
    async with gateway(rooms, clock, redis) as running:
        key_id = running.caller(key).key_id
        await spend(rooms, tenant, 700, NOON - 60, key_id=key_id)
        running.limits.shared.may_lack.set()
        await running.is_spent(key, 700)
        await spend(rooms, tenant, await running.ask(key), NOON - 60, key_id=key_id)
        await running.limits.shared.close()
        await redis.call("FLUSHALL")
        cost = await running.ask(key)  # by what this gateway has heard of
        await running.limits.shared.close()
        await spend(rooms, tenant, cost, NOON - 60, key_id=key_id)
        assert await running.spent(key) == 900
        await redis.call("FLUSHALL")
        await running.is_spent(key, 900)
        await running.ask(key)
        await running.limits.shared.close()
        with pytest.raises(BudgetSpent, match="this API key"):
            await running.ask(key)
