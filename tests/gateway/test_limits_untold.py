"""What a gateway let in while Redis was away counts there when it is back: once, and for as long as it matters."""

from __future__ import annotations

import contextlib
import random
from decimal import Decimal

import pytest

from gateway.errors import RateLimited
from gateway.limits.shared import SharedMeters
from gateway.redis import RedisAway
from policies import admission, settings
from policies.policy import Budget, Policy, Price
from policies.policy import Limits as Ceilings
from policies.rate import DAY_MS, MINUTE_MS, NUM_SLOTS, Window
from policies.terms import Usage
from tests.builders import HandClock, a_caller
from tests.conftest import PATIENT_MS
from tests.gateway.limited import a_gateway, ask
from tests.redis import stalled

CALLER = a_caller(Policy(limits=Ceilings(requests_per_minute=40, tokens_per_minute=4000, tokens_per_day=90_000)))


@pytest.fixture
async def fragile(fragile_redis):
    """Limits of two gateways over a Redis that goes away, and their clock."""
    clock = HandClock()
    redis_settings = settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=2.0)
    async with contextlib.AsyncExitStack() as stack:
        made = [a_gateway(redis_settings, clock, num_gateways=lambda: 2) for _ in range(2)]
        yield [await stack.enter_async_context(each) for each in made], clock, fragile_redis


async def counted(limits, caller=CALLER):
    return {each.limit: each.used for each in await limits.peek(caller.policy, caller.tenant_id, caller.key_id)}


async def back(gateways, clock):
    """Redis, and every gateway has noticed."""
    clock.advance(2.0)
    for limits in gateways:
        await limits.look()
        await limits.shared.close()


async def gone(gateways, server):
    """Redis, with all that it had, and every gateway has noticed."""
    server.kill()
    for limits in gateways:
        with contextlib.suppress(RedisAway):
            await limits.readings([])


async def test_what_gateways_let_in_meanwhile_counts_when_redis_is_back(fragile):
    gateways, clock, server = fragile
    await gone(gateways, server)
    for limits in gateways:
        for number in range(15):
            await ask(limits, CALLER, request_id=f"r{number}")
    server.start()
    await back(gateways, clock)
    assert await counted(gateways[0]) == {"requests_per_minute": 30, "tokens_per_minute": 900, "tokens_per_day": 900}
    await back(gateways, clock)
    assert (await counted(gateways[0]))["tokens_per_day"] == 900
    for number in range(10):
        await ask(gateways[number % 2], CALLER, request_id=f"next {number}")
    with pytest.raises(RateLimited, match="Limit 40, Used 40"):
        await ask(gateways[0], CALLER, request_id="one too many")


async def test_what_has_left_a_window_meanwhile_is_not_told_of_it(fragile):
    gateways, clock, server = fragile
    await gone(gateways, server)
    await ask(gateways[0], CALLER)
    clock.advance(62.0)
    await ask(gateways[0], CALLER)
    server.start()
    await back(gateways, clock)
    assert await counted(gateways[0]) == {"requests_per_minute": 1, "tokens_per_minute": 30, "tokens_per_day": 60}


async def test_what_redis_has_heard_without_saying_so_is_not_counted_again(fragile):
    gateways, clock, server = fragile
    await gone(gateways, server)
    await ask(gateways[0], CALLER)
    server.start()
    clock.advance(2.0)
    await gateways[0].shared.look()
    with stalled(server, gateways[0].shared._redis), pytest.raises(RedisAway):
        await gateways[0]._untold.tell(gateways[0].shared, {})  # Redis does what it is asked when it goes on
    await back(gateways, clock)
    assert await counted(gateways[0]) == {"requests_per_minute": 1, "tokens_per_minute": 30, "tokens_per_day": 30}


async def test_what_a_request_grew_by_without_redis_is_told_less_what_it_did_not_use(fragile):
    gateways, clock, server = fragile
    async with gateways[0].admit(CALLER, "demo", 10, 1000, "r") as ticket:
        with stalled(server, gateways[0].shared._redis):
            with pytest.raises(RedisAway):
                await gateways[0].readings([])
            assert await ticket.top_up(150)
            ticket.settle(Usage(10, 0, 150))
            await gateways[0].shared.close()
            assert ticket.num_covered > 150
    await back(gateways, clock)
    assert (await counted(gateways[0]))["tokens_per_day"] == 160


async def test_open_requests_that_were_let_in_without_redis_hold_their_places_and_money_when_it_is_back(fragile):
    gateways, clock, server = fragile
    policy = Policy(
        limits=Ceilings(concurrent_requests=4),
        budget=Budget(Decimal("0.001")),
        prices={"*": Price(request=Decimal("0.0001"))},
    )
    caller = a_caller(policy)
    await gone(gateways, server)
    async with gateways[0].admit(caller, "demo", 10, 10, "lasts"):
        async with gateways[0].admit(caller, "demo", 10, 10, "ends") as ending:
            server.start()
            await back(gateways, clock)
            await back(gateways, clock)
            assert await counted(gateways[1], caller) == {"concurrent_requests": 2, "budget": 200}
            ending.settle(Usage(10, 0, 10))
        await gateways[0].shared.close()
        assert await counted(gateways[1], caller) == {"concurrent_requests": 1, "budget": 200}
        await gateways[0].renew()
        assert await counted(gateways[1], caller) == {"concurrent_requests": 1, "budget": 200}
    await gateways[0].shared.close()
    assert await counted(gateways[1], caller) == {"concurrent_requests": 0, "budget": 100}


async def test_what_open_requests_hold_is_held_again_by_a_redis_that_lost_it(fragile):
    gateways, _, _ = fragile
    price = {"*": Price(request=Decimal("0.0001"))}
    caller = a_caller(Policy(limits=Ceilings(concurrent_requests=4), budget=Budget(Decimal("0.0003")), prices=price))
    async with (
        gateways[0].admit(caller, "demo", 10, 10, "here"),
        gateways[1].admit(caller, "demo", 10, 10, "there") as there,
    ):
        await gateways[0].shared._redis.call("FLUSHALL")
        for limits in gateways:
            await limits.look()
        assert await counted(gateways[0], caller) == {"concurrent_requests": 2, "budget": 200}
        async with gateways[0].admit(caller, "demo", 10, 10, "last"):
            with pytest.raises(RateLimited, match="set aside"):
                await ask(gateways[1], caller, request_id="one too many")
        there.settle(Usage(10, 0, 10))
    for limits in gateways:
        await limits.shared.close()
    assert await counted(gateways[0], caller) == {"concurrent_requests": 0, "budget": 100}


@pytest.mark.parametrize("seed", range(10))
async def test_what_is_told_counts_as_long_as_its_window_lasts_and_no_more_than_two_slots_longer(redis, seed):
    """Whatever else the window has, is given back and is told at the same time."""
    rng, shared = random.Random(seed), SharedMeters(redis)
    slot_ms = rng.choice([MINUTE_MS, DAY_MS]) // NUM_SLOTS
    (rule,) = [
        rule
        for rule in admission.rules_for(CALLER.policy, "ten_1", "key_1", "demo")
        if rule.kind == "tokens" and rule.slot_ms == slot_ms
    ]
    now_ms, span_ms = 1_795_000_000_000, slot_ms * NUM_SLOTS
    came: list[tuple[int, int]] = []
    for number in range(300):
        now_ms += rng.choice([0, 1, slot_ms // 3, slot_ms, 7 * slot_ms, span_ms // 2, 3 * span_ms])
        window, clock_ms = Window(slot_ms), rng.randrange(span_ms)  # the gateway's own clock, which began with it
        for ago_ms in sorted((rng.randrange(2 * span_ms) for _ in range(rng.randrange(4))), reverse=True):
            amount = rng.randrange(1, 100)
            window.add(amount, clock_ms + 3 * span_ms - ago_ms)
            came.append((now_ms - ago_ms, amount))
        slots, at_ms = window.slots, clock_ms + 3 * span_ms
        told = [(max(0, at_ms - (slots[at] + 1) * slot_ms), slots[at + 1]) for at in range(0, len(slots), 2)]
        await shared.add(rule.name, slot_ms, f"{seed} {number}", told, now_ms)
        total, reset_ms = await shared.readings([rule], now_ms)
        least = sum(amount for at, amount in came if now_ms - at < span_ms)
        most = sum(amount for at, amount in came if now_ms - at < span_ms + 3 * slot_ms)
        assert least <= total <= most, (seed, number)
        assert (reset_ms > 0) == (total > 0), (seed, number)
