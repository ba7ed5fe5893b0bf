"""What gateways that share limits hold to while their Redis is away, and what it hears when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from decimal import Decimal

import pytest

from gateway.errors import LimitsUnavailable, RateLimited, RequestsLimited, TokensLimited
from gateway.limits import Limits
from gateway.limits.ticket import Ticket
from policies import settings
from policies.policy import Budget, Policy, Price
from policies.policy import Limits as Ceilings
from policies.terms import Usage
from tests.builders import PATIENCE_S, HandClock, a_caller
from tests.conftest import PATIENT_MS
from tests.gateway.limited import a_gateway
from tests.redis import stalled


@pytest.fixture
async def fragile(fragile_redis):
    """Limits over a Redis that is stalled and resumed; of three gateways, as was last heard."""
    clock = HandClock()
    redis_settings = settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=2.0)
    async with a_gateway(redis_settings, clock, num_gateways=lambda: 3) as limits:
        yield limits, clock, fragile_redis


async def test_without_redis_each_gateway_holds_to_its_part_of_the_limit(fragile):
    limits, clock, server = fragile
    caller = a_caller(Policy(limits=Ceilings(tokens_per_minute=1500)))
    async with limits.admit(caller, "demo", 100, 100, "a") as before:
        with stalled(server, limits.shared._redis):
            async with limits.admit(caller, "demo", 100, 100, "b") as ticket:
                assert ticket.headers()["x-ratelimit-limit-tokens"] == "500"
                ticket.settle(Usage(100, 0, 100))
            with pytest.raises(TokensLimited, match="Limit 500, Used 400"):
                async with limits.admit(caller, "demo", 100, 100, "c"):
                    pass
            assert await before.top_up(100)  # what was let in goes on
            other = a_caller(caller.policy, "ten_other")
            async with limits.admit(other, "demo", 450, 100, "whole part") as ticket:  # the estimate is more than that
                assert ticket.num_covered == 50
            with pytest.raises(LimitsUnavailable):  # it fits the whole limit, though not the part of it
                async with limits.admit(caller, "demo", 600, 100, "d"):
                    pass
    clock.advance(2.0)
    await limits.readings([])
    async with limits.admit(caller, "demo", 600, 100, "e") as ticket:
        assert ticket.headers()["x-ratelimit-limit-tokens"] == "1500"


@pytest.mark.parametrize("seed", range(6))
async def test_when_redis_goes_away_no_minute_has_more_than_the_ceilings(fragile_redis, seed):
    """At three gateways that have been asked alike until then; what they are asked afterwards is up to chance."""
    rng, clock = random.Random(seed), HandClock()
    ceilings = Ceilings(requests_per_minute=60, tokens_per_minute=6000, concurrent_requests=9)
    caller = a_caller(Policy(limits=ceilings))
    redis_settings = settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=600.0)
    running: list[tuple[float, int, Ticket]] = []
    over: list[tuple[float, float, int]] = []

    async def begin(limits: Limits, wanted: int) -> None:
        ticket = limits.admit(caller, "demo", 50, 1000, f"r{len(running) + len(over)}")
        with contextlib.suppress(RateLimited):
            await ticket.__aenter__()
            running.append((clock.now(), wanted, ticket))

    async def end(place: int) -> None:
        began_at, wanted, ticket = running.pop(place)
        num_tokens = wanted if ticket.covers(wanted) or await ticket.top_up(wanted) else ticket.num_covered
        ticket.settle(Usage(50, 0, num_tokens))
        await ticket.__aexit__(None, None, None)
        over.append((began_at, clock.now(), 50 + num_tokens))

    async with contextlib.AsyncExitStack() as stack:
        made = [a_gateway(redis_settings, clock, num_gateways=lambda: 3) for _ in range(3)]
        gateways = [await stack.enter_async_context(each) for each in made]
        for _ in range(rng.randrange(4, 8)):
            wanted = rng.randrange(1, 200)
            for limits in gateways:
                await begin(limits, wanted)
            if len(running) == 9 or rng.random() < 0.5:
                for _ in gateways:
                    await end(0)
            clock.advance(rng.choice([0.0, 0.3, 1.0, 3.0]))
        with contextlib.ExitStack() as away:
            for limits in gateways:
                away.enter_context(stalled(fragile_redis, limits.shared._redis))
            for _ in range(400):
                if running and rng.random() < 0.5:
                    await end(rng.randrange(len(running)))
                else:
                    await begin(rng.choice(gateways), rng.randrange(1, 300))
                clock.advance(rng.choice([0.0, 0.3, 1.0, 3.0]))
                assert len(running) <= 9, seed
                of_minute = [num for began_at, _, num in over if began_at > clock.now() - 60.0]
                assert len(of_minute) <= 60, seed
                assert sum(of_minute) <= 6000, seed
            while running:
                await end(0)
    assert len(over) > 100, seed


@pytest.mark.parametrize("without_redis", ["divide", "refuse"])
async def test_places_of_requests_that_ended_without_redis_are_free_when_it_is_back(fragile, without_redis):
    limits, clock, server = fragile
    caller = a_caller(Policy(limits=Ceilings(concurrent_requests=6), without_redis=without_redis))
    async with limits.admit(caller, "demo", 10, 10, "lasts"):
        ending = limits.admit(caller, "demo", 10, 10, "ends")
        await ending.__aenter__()
        with stalled(server, limits.shared._redis):
            await ending.__aexit__(None, None, None)
            await limits.shared.close()
        clock.advance(2.0)
        await limits.shared.look()
        await limits.shared.close()
        refused = limits.admit(caller, "demo", 10, 10, "refused")
        outcome = pytest.raises(LimitsUnavailable) if without_redis == "refuse" else contextlib.nullcontext()
        with stalled(server, limits.shared._redis), outcome:  # Redis does what it is asked when it goes on
            await refused.__aenter__()
        clock.advance(2.0)
        await limits.shared.look()
        await limits.shared.close()
        async with contextlib.AsyncExitStack() as stack:
            for number in range(5):
                await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, f"next {number}"))
            with pytest.raises(RateLimited):  # for the one that lasts holds what it held
                await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, "one too many"))
        if without_redis == "divide":
            await refused.__aexit__(None, None, None)


async def test_places_are_free_as_well_of_requests_that_also_had_a_cost_while_redis_was_away(fragile):
    limits, clock, server = fragile
    policy = Policy(
        limits=Ceilings(concurrent_requests=1),
        budget=Budget(Decimal(1)),
        prices={"*": Price(request=Decimal("0.0001"))},
    )
    async with limits.admit(a_caller(policy), "demo", 10, 10, "before"):
        pass
    await limits.shared.close()
    with stalled(server, limits.shared._redis):  # Redis does what it is asked when it goes on
        async with limits.admit(a_caller(policy), "demo", 10, 10, "costs") as ticket:
            ticket.settle(Usage(10, 0, 10))
        await limits.shared.close()
    clock.advance(2.0)
    await limits.shared.look()
    await limits.shared.close()
    async with limits.admit(a_caller(policy), "demo", 10, 10, "next"):
        pass


@pytest.mark.parametrize("num_open", [1, 2, 3])
async def test_without_redis_what_requests_hold_there_of_a_budget_is_not_there_to_be_divided(fragile, num_open):
    limits, _, server = fragile
    prices = {"*": Price(request=Decimal("0.0001"))}
    caller = a_caller(Policy(budget=Budget(Decimal("0.0006")), prices=prices))  # for two requests at each gateway
    async with contextlib.AsyncExitStack() as stack:
        for number in range(num_open):
            await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, f"open {number}"))
        with stalled(server, limits.shared._redis):
            for number in range(num_open, 2):
                await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, f"open {number}"))
            with pytest.raises(RequestsLimited):  # rather than told that the budget is spent
                await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, "one too many"))
        assert not limits.refused


async def test_what_requests_have_cost_that_ended_without_redis_is_not_there_to_be_divided(fragile):
    limits, _, server = fragile
    prices = {"*": Price(request=Decimal("0.0001"))}
    caller = a_caller(Policy(budget=Budget(Decimal("0.0006")), prices=prices))  # for two requests at each gateway
    async with contextlib.AsyncExitStack() as stack:
        tickets = [await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, f"{n}")) for n in range(2)]
        with stalled(server, limits.shared._redis):
            for ticket in tickets:
                ticket.settle(Usage(10, 0, 10))
            await stack.aclose()
            await limits.shared.close()
            async with limits.admit(caller, "demo", 10, 10, "of the third of what is left"):
                with pytest.raises(RequestsLimited):
                    await stack.enter_async_context(limits.admit(caller, "demo", 10, 10, "one too many"))


async def test_without_redis_a_policy_may_rather_refuse(fragile):
    limits, clock, server = fragile
    caller = a_caller(Policy(limits=Ceilings(tokens_per_minute=900), without_redis="refuse"))
    with stalled(server, limits.shared._redis):
        for _ in range(3):
            with pytest.raises(LimitsUnavailable) as refused:
                await asyncio.wait_for(limits.admit(caller, "demo", 100, 100, "a").__aenter__(), PATIENCE_S)
            assert refused.value.headers()["retry-after"] == "2"
    clock.advance(2.0)
    async with limits.admit(caller, "demo", 100, 100, "b"):
        pass


async def test_a_tenant_without_ceilings_does_not_notice(fragile):
    limits, _, server = fragile
    server.stall()
    async with limits.admit(a_caller(Policy(without_redis="refuse")), "demo", 100, 100, "a") as ticket:
        assert ticket.covers(10**6)


async def test_without_redis_a_gateway_spends_its_part_of_a_budget_and_no_more(fragile):
    limits, _, server = fragile
    caller = a_caller(Policy(budget=Budget(Decimal("0.0018")), prices={"*": Price(request=Decimal("0.0001"))}))

    async def ask_once():
        async with limits.admit(caller, "demo", 10, 10, "r") as ticket:
            ticket.settle(Usage(10, 0, 10))
        await limits.shared.close()

    for _ in range(3):
        await ask_once()
    with stalled(server, limits.shared._redis):
        for _ in range(5):  # a third of fifteen
            await ask_once()
        with pytest.raises(RequestsLimited):
            await ask_once()
