"""The same limits counted by several gateways in one real Redis, and what happens while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from decimal import Decimal

import pytest

from gateway.clock import Clock
from gateway.errors import RateLimited
from gateway.limits import RENEW_S, metered
from gateway.limits.plans import Plans
from gateway.limits.shared import SharedMeters
from policies import admission
from policies.admission import Ask, Grant
from policies.policy import Budget, Narrowing, Policy, Price, narrowed
from policies.policy import Limits as Ceilings
from policies.rate import Purse
from policies.terms import Usage
from tests.builders import PATIENCE_S, a_caller, a_submit, tokens, when
from tests.gateway.limited import a_gateway
from tests.gateway.test_cache_runs import Engine

POLICY = Policy(
    limits=Ceilings(requests_per_minute=40, tokens_per_minute=1000, tokens_per_day=9000, concurrent_requests=6),
    key_limits=Ceilings(tokens_per_minute=700),
    model_limits={"*": Ceilings(concurrent_requests=5)},
    budget=Budget(Decimal("0.12"), "day"),
)
CEILING = a_caller(Policy(limits=Ceilings(tokens_per_minute=100_000)))


def rules_of(tenant_id, hard=True):
    """``hard``: the key's own budget."""
    policy = narrowed(POLICY, Narrowing(budget=Budget(Decimal("0.08"), "week", hard)))
    return Plans(wall=lambda: 1_795_000_000).find(a_caller(policy, tenant_id), "demo").rules


class Walk:
    """The same steps taken by the gauges in memory and by those in Redis; whatever they say has to be the same."""

    def __init__(self, shared: SharedMeters, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shared = shared
        self.seed = seed
        self.now_ms = 1_795_000_000_000
        self.rules = rules_of(f"ten_{seed}", hard=seed % 4 > 0)
        self.steps_ms = [0, 0, 1, 30, 400, 3000, 30_000, 90_000, 2_000_000, 100_000_000]
        if seed % 3 == 0:  # Redis's clock may be set back a little; the order of leases in memory relies on its own
            self.rules = tuple(rule for rule in self.rules if rule.slot_ms)
            self.steps_ms += [-700, -3000]
        self.growing = [rule for rule in self.rules if rule.kind in ("tokens", "money")]
        self.gauges = {rule.name: admission.gauge_for(rule) for rule in self.rules}
        self.open: dict[str, list[Grant]] = {}
        self.outcomes: dict[str, int] = {}

    def of(self, rules):
        return [self.gauges[rule.name] for rule in rules]

    async def step(self, number: int) -> None:
        self.now_ms += self.rng.choice(self.steps_ms)
        step = self.rng.choice([self.admit, self.admit, self.admit, self.grow, self.settle, self.settle, self.renew])
        await step(f"r{number}")
        expected = admission.readings(self.of(self.rules), self.now_ms)
        assert await self.shared.readings(self.rules, self.now_ms) == expected, (self.seed, number, step)

    async def take(self, rules, ask: Ask) -> bool:
        expected = admission.take(rules, self.of(rules), ask, self.now_ms)
        outcome, readings = await self.shared.take(rules, ask, self.now_ms)
        assert outcome == expected, (self.seed, ask)
        assert readings == admission.readings(self.of(rules), self.now_ms), (self.seed, ask)
        name = f"{type(outcome).__name__} {getattr(outcome, 'rule', '')}"
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        if isinstance(outcome, Grant):
            self.open.setdefault(ask.request_id, []).append(outcome)
        return isinstance(outcome, Grant)

    async def admit(self, request_id: str) -> None:
        least, micros = self.rng.randrange(300), self.rng.choice([0, 1, 1, 1]) * self.rng.randrange(4000)
        most = least + self.rng.choice([0, self.rng.randrange(400)])
        await self.take(self.rules, Ask(request_id, least, most, micros // 2, micros))

    async def grow(self, _: str) -> None:
        if self.open:
            request_id = self.rng.choice(list(self.open))
            await self.take(self.growing, Ask(request_id, self.rng.randrange(50), 100, 10, self.rng.randrange(10, 900)))

    async def settle(self, _: str) -> None:
        if not self.open:
            return
        request_id = self.rng.choice(list(self.open))
        grants = self.open.pop(request_id)
        unused = [(grant.at_ms, self.rng.choice([0, grant.tokens, self.rng.randrange(500)])) for grant in grants]
        overused, cost = self.rng.choice([0, 0, 15]), self.rng.randrange(2000)
        expected = admission.settle(self.rules, self.of(self.rules), request_id, unused, overused, cost, self.now_ms)
        assert await self.shared.settle(self.rules, request_id, unused, overused, cost, self.now_ms) == expected

    async def renew(self, _: str) -> None:
        for rule in self.rules:
            gauge = self.gauges[rule.name]
            if rule.kind in ("concurrent", "money"):
                for request_id in self.open:
                    (gauge.leases if isinstance(gauge, Purse) else gauge).renew(request_id, self.now_ms)
                await self.shared.renew(rule, self.open, self.now_ms)


@pytest.mark.parametrize("seed", range(12))
async def test_memory_and_redis_agree_on_every_step_of_a_long_walk(redis, seed):
    walk = Walk(SharedMeters(redis), seed)
    for number in range(500):
        await walk.step(number)
    assert walk.outcomes["Grant "] > 25
    assert len(walk.outcomes) > 2  # refused by several of the rules


@pytest.fixture
async def three_gateways(redis_settings):
    """Limits of three gateways over one Redis, each with a connection pool of its own."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(a_gateway(redis_settings)) for _ in range(3)]


async def test_a_thousand_requests_at_three_gateways_use_no_token_above_one_limit(three_gateways):
    rng, delivered, waits = random.Random(5), [], []

    async def request(number):
        try:
            limits = three_gateways[number % 3]
            async with limits.admit(CEILING, "demo", 100, 1000, f"r{number}") as ticket:
                written, wanted = 0, rng.randrange(400)
                while written < wanted and (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                    written += 1
                ticket.settle(Usage(100, 0, written))
                delivered.append(100 + written)
                assert "x-ratelimit-remaining-tokens" in ticket.headers()
        except RateLimited as refused:
            waits.append(refused.retry_after_s)

    await asyncio.gather(*(request(number) for number in range(1000)))
    await settled(three_gateways)
    assert 90_000 < sum(delivered) <= 100_000
    assert all(0 < wait_s <= 61 for wait_s in waits)
    (reading,) = await three_gateways[0].peek(CEILING.policy, CEILING.tenant_id)
    assert reading.used == sum(delivered)


async def settled(gateways):
    """Until all that was given back has arrived."""
    for limits in gateways:
        await limits.shared.close()


async def test_three_gateways_overspend_no_budget_and_tell_each_share_once(redis_settings):
    told = []
    budget = Budget(Decimal("0.1"), "day", alerts_at=(0.5, 0.9))
    ceilings, price = Ceilings(requests_per_minute=1000), Price(prompt=Decimal(1), completion=Decimal(2))
    caller = a_caller(Policy(limits=ceilings, budget=budget, prices={"*": price}))
    costs = []
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(a_gateway(redis_settings, alert=told.append)) for _ in range(3)]

        async def request(number):
            with contextlib.suppress(RateLimited):
                async with gateways[number % 3].admit(caller, "demo", 100, 200, f"r{number}") as ticket:
                    written = 0
                    while written < 150 and (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                        written += 1
                    costs.append(ticket.settle(Usage(100, 0, written)))

        for first in range(0, 600, 200):
            await asyncio.gather(*(request(number) for number in range(first, first + 200)))
            await settled(gateways)
    assert 95_000 < sum(costs) <= 100_000
    assert sorted(alert.share for alert in told) == [0.5, 0.9]
    for limits in gateways:  # of what lies in Redis a gateway knows by itself what it has heard of the budget
        (reading,) = limits.known(caller.policy, caller.tenant_id)
        assert (reading.limit, reading.ceiling) == ("budget", 100_000)
        assert 0 < reading.used <= sum(costs)
    assert limits.known(caller.policy, "ten_never_heard_of") == []


async def test_what_was_heard_to_be_spent_never_falls(redis_settings):
    caller = a_caller(Policy(budget=Budget(Decimal(1), "month")))
    async with a_gateway(redis_settings, wall=lambda: 1_795_000_000.0) as limits:
        (budget,) = limits.plans.find(caller, "demo").budgets
        for restored, spent in ((100, 100), (300, 300), (200, 300)):
            await limits.restore(budget, restored)
            (known,) = limits.known(caller.policy, caller.tenant_id)
            (seen,) = await limits.peek(caller.policy, caller.tenant_id)
            assert (known.used, seen.used) == (spent, spent)


async def test_what_a_gateway_that_died_held_is_free_again_after_a_minute(redis):
    shared = SharedMeters(redis)
    rules = rules_of("ten_1")
    for number in range(5):
        grant, _ = await shared.take(rules, Ask(f"r{number}", 1, 1, 4000, 4000), 1_000_000)
        assert isinstance(grant, Grant)
    refusal, _ = await shared.take(rules, Ask("late", 1, 1), 1_000_000)
    assert rules[refusal.rule].limit == "concurrent_requests"
    await shared.renew(rules[3], ["r0", "never"], 1_050_000)
    grant, readings = await shared.take(rules, Ask("later", 1, 1, 1, 20_000), 1_060_000)
    assert grant.micros == 20_000
    assert readings[6] == 2


async def test_a_gateway_that_stood_still_for_longer_holds_its_places_and_money_again(redis_settings, redis, clock):
    price = Price(completion=Decimal(1))
    policy = Policy(limits=Ceilings(concurrent_requests=2), budget=Budget(Decimal(1)), prices={"*": price})
    caller = a_caller(policy)
    async with a_gateway(redis_settings, clock) as limits, limits.admit(caller, "demo", 100, 100, "r"):
        rules = limits.plans.find(caller, "demo").rules
        before = await limits.readings(rules)
        assert before[::2] == [1, 100]
        for rule in rules:  # as after a minute
            await redis.call("DEL", *(redis.key(f"limits:{rule.name}{end}") for end in ("", ":until")))
        assert (await limits.readings(rules))[::2] == [0, 0]
        clock.advance(3 * RENEW_S)
        await when(lambda: limits.readings(rules), lambda found: found == before)


async def test_what_costs_nothing_is_settled_at_every_budget(redis_settings, redis, clock):
    """Its hold is 0, which Redis is not to hear of as -0: whoever comes next would find the rest of it, and fail."""
    caller = a_caller(Policy(budget=Budget(Decimal(1)), key_budget=Budget(Decimal(1))))
    async with a_gateway(redis_settings, clock) as limits:
        rules = limits.plans.find(caller, "demo").rules
        async with limits.admit(caller, "demo", 100, 100, "r") as ticket:
            ticket.settle(Usage(100, 0, 100))
        await limits.shared.close()
        purses = [await redis.call("HGETALL", redis.key(f"limits:{rule.name}")) for rule in rules]
        assert purses == [{b"held": b"0", b"spent": b"0"}] * 2


async def test_whoever_hangs_up_while_redis_decides_leaves_nothing_set_aside(three_gateways):
    limits = three_gateways[0]
    caller = a_caller(Policy(limits=Ceilings(tokens_per_minute=1000, concurrent_requests=5)))

    async def request():
        async with limits.admit(caller, "demo", 100, 100, "r"):
            pass

    async def is_free():
        readings = await limits.peek(caller.policy, caller.tenant_id)
        return [reading.used for reading in readings] == [0, 0]

    for turns in range(6):  # cancelled at each point on its way
        asking = asyncio.create_task(request())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await settled(three_gateways)
        # The script may run once more after that, so that its outcome is given back as well.
        async with asyncio.timeout(PATIENCE_S):
            while not await is_free():
                await settled(three_gateways)


async def test_what_arrives_while_a_stream_loses_patience_for_its_first_token_is_told_all_the_same(three_gateways):
    """A stream waits a second for its first token before it sends its headers, and then goes on waiting."""
    engine, submit = Engine(Clock()), a_submit(max_tokens=500)
    flight = engine.submit(submit)
    async with three_gateways[0].admit(CEILING, "demo", 4, 500, submit.request_id) as ticket:
        source = metered(flight, ticket, [submit])
        for first, reason in ((0, None), (80, None), (160, "length")):
            engine.say(flight, range(first, first + 80), reason)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await source.deltas()  # more than was set aside, so Redis is asked
        assert tokens(await source.deltas()) == list(range(240))
