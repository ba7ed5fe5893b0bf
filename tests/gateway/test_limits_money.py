"""Budgets of money over one gateway's own gauges."""

from __future__ import annotations

import asyncio
import contextlib
import random
from decimal import Decimal

import msgspec
import pytest

from gateway.errors import BudgetSpent, RateLimited, RequestsLimited
from gateway.limits import Limits
from gateway.restrictions import Scopes
from policies import settings
from policies.admission import NO_CEILING
from policies.policy import Budget, Price
from policies.policy import Limits as Ceilings
from policies.terms import Usage
from tests.builders import a_caller
from tests.gateway.limited import DEMO, DOLLAR, ESTIMATE, a_policy, a_spender, ask, limits_of, used


@pytest.fixture
def limits(clock):
    return limits_of(clock)


async def test_a_request_costs_what_it_used_and_the_rest_of_the_money_is_free_again(limits):
    caller = a_spender("0.001")
    async with limits.admit(caller, DEMO, 40, 5000, "r") as ticket:
        assert used(limits, caller) == {"tenant budget": 40 + 200 + 10}
        assert ticket.settle(Usage(40, 20, 30)) == 20 + 10 + 60 + 10
        assert ticket.settle(Usage(40, 0, 3000)) == 100
        assert ticket.cost_micros == 100
    assert used(limits, caller) == {"tenant budget": 100}


async def test_a_stream_gets_what_the_budget_still_pays_for_to_the_token(limits):
    caller = a_spender("0.0003")
    async with limits.admit(caller, DEMO, 50, 5000, "r") as ticket:
        written = 0
        while ticket.covers(written + 1) or await ticket.top_up(written + 1):
            written += 1
        assert written == (300 - 50 - 10) // 2
        assert ticket.settle(Usage(50, 0, written)) == 300
    with pytest.raises(BudgetSpent) as refused:
        await ask(limits, caller)
    assert (refused.value.status, refused.value.type, refused.value.code) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert refused.value.headers() == {
        "x-should-retry": "false",
        "x-ratelimit-limit-budget": "0.0003",
        "x-ratelimit-spent-budget": "0.0003",
        "x-ratelimit-reserved-budget": "0.00",
        "x-ratelimit-remaining-budget": "0.00",
        "x-ratelimit-reset-budget": "12h53m20s",
    }
    assert "Limit 0.0003 USD, Spent 0.0003 USD, Reserved 0.00 USD, Requested 0.000022 USD. " in str(refused.value)


@pytest.mark.parametrize(("endpoints", "is_told"), [(None, True), (("models", "usage"), True), (("models",), False)])
async def test_what_a_tenant_spends_is_told_to_keys_that_may_read_it(limits, endpoints, is_told):
    caller = msgspec.structs.replace(a_spender("0.00027"), scopes=Scopes(endpoints))
    async with limits.admit(caller, DEMO, 50, 5000, "dear") as ticket:
        with pytest.raises(RequestsLimited) as refused:
            await ask(limits, caller)
        told = ": Limit 0.00027 USD, Spent 0.00 USD, Reserved 0.00026 USD, Requested 0.000022 USD"
        assert (told in str(refused.value)) == is_told
        assert ("x-ratelimit-reserved-budget" in refused.value.headers()) == is_told
        assert refused.value.kept == str(refused.value).replace(told, "")
        ticket.settle(Usage(50, 0, 100))
    with pytest.raises(BudgetSpent) as spent:
        await ask(limits, caller)
    told = ": Limit 0.00027 USD, Spent 0.00026 USD, Reserved 0.00 USD, Requested 0.000022 USD"
    assert (told in str(spent.value)) == is_told
    assert (spent.value.headers().get("x-ratelimit-remaining-budget") == "0.00001") == is_told
    assert spent.value.kept == str(spent.value).replace(told, "")


async def test_who_is_refused_for_money_that_others_only_hold_may_come_again(limits):
    caller = a_spender("0.00027")
    async with limits.admit(caller, DEMO, 50, 5000, "dear") as ticket:
        with pytest.raises(RequestsLimited) as refused:
            await ask(limits, caller)
        assert (refused.value.code, refused.value.headers()["retry-after"]) == ("rate_limit_exceeded", "1")
        assert "x-should-retry" not in refused.value.headers()
        ticket.settle(Usage(50, 0, 1))
    await ask(limits, caller)


async def test_a_thousand_requests_at_once_overspend_no_budget(limits):
    caller = a_spender("0.1")
    costs = []

    async def request(number):
        with contextlib.suppress(RateLimited):
            async with limits.admit(caller, DEMO, 100, 1000, f"r{number}") as ticket:
                written = 0
                while written < 150 and (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                    written += 1
                    if written % 50 == 0:
                        await asyncio.sleep(0)
                costs.append(ticket.settle(Usage(100, 0, written)))

    await asyncio.gather(*(request(number) for number in range(1000)))
    assert 90_000 < sum(costs) <= 100_000
    assert used(limits, caller) == {"tenant budget": sum(costs)}


async def test_the_engines_seconds_are_spent_when_they_are_known_and_then_end_what_still_grows(limits):
    price = Price(engine_second=Decimal("0.5"))
    caller = a_caller(a_policy(budget=Budget(Decimal("0.001"), "day"), price=price))
    async with limits.admit(caller, DEMO, 40, 5000, "growing") as growing:
        async with limits.admit(caller, DEMO, 40, 50, "brief") as brief:
            assert brief.settle(Usage(40, 0, 50), "miss", 1998) == 999
        assert growing.covers(ESTIMATE)
        assert not await growing.top_up(ESTIMATE + 1)
        assert growing.settle(Usage(40, 0, ESTIMATE), "miss", 3000) == 1500
    assert used(limits, caller) == {"tenant budget": 2499}
    with pytest.raises(BudgetSpent):
        await ask(limits, caller)


HIT = Price(prompt=Decimal(10), completion=Decimal(10), cache_hit=Decimal(1))
"""An answer from the cache is a micro-unit a token, and a computed one ten."""


async def test_a_kept_answer_is_paid_for_as_a_whole_or_refused(limits):
    caller = a_caller(a_policy(budget=Budget(Decimal("0.00025"), "day"), price=HIT))
    async with limits.admit(caller, DEMO, 40, 60, "a", outcome="hit") as ticket:
        assert used(limits, caller) == {"tenant budget": 100}
        assert ticket.num_covered == NO_CEILING
        async with limits.admit(caller, DEMO, 40, 60, "b", outcome="hit") as another:
            with pytest.raises(RateLimited):
                await limits.admit(caller, DEMO, 40, 60, "c", outcome="hit").__aenter__()
            assert another.settle(Usage(40, 0, 60), "hit") == 100
        assert ticket.settle(Usage(40, 0, 11), "hit") == 51
    assert used(limits, caller) == {"tenant budget": 151}


@pytest.mark.parametrize("seed", range(3))
async def test_a_thousand_answers_from_the_cache_at_once_overspend_no_budget(limits, seed):
    caller, rng, costs = a_caller(a_policy(budget=Budget(Decimal("0.01"), "day"), price=HIT)), random.Random(seed), []

    async def request(number, num_tokens, num_turns):
        with contextlib.suppress(RateLimited):
            async with limits.admit(caller, DEMO, 100, num_tokens, f"r{number}", outcome="hit") as ticket:
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                costs.append(ticket.settle(Usage(100, 0, num_tokens), "hit"))

    await asyncio.gather(*(request(number, rng.randrange(1, 400), rng.randrange(5)) for number in range(1000)))
    assert 9_000 < sum(costs) <= 10_000
    assert used(limits, caller) == {"tenant budget": sum(costs)}


async def test_whoever_reads_along_has_the_money_for_it_should_they_become_the_one_who_pays(limits):
    policy = a_policy(tokens_per_minute=10_000, budget=Budget(Decimal("0.00025"), "day"), price=DOLLAR)
    caller = a_caller(policy)
    async with limits.admit(caller, DEMO, 40, 5000, "r", outcome="shared") as ticket:
        assert used(limits, caller) == {"tenant tokens_per_minute": 0, "tenant budget": 40 + 200 + 10}
        assert not ticket.covers(1)
        assert await ticket.top_up(100, is_from_cache=True)
        assert not await ticket.top_up(101, is_from_cache=True)
        assert ticket.num_paid == 100
        assert await ticket.top_up(100), "it pays from now on, and takes its tokens"
        assert used(limits, caller)["tenant tokens_per_minute"] == 140
        ticket.settle(Usage(40, 0, 100))
    assert used(limits, caller) == {"tenant tokens_per_minute": 140, "tenant budget": 250}


async def test_a_soft_budget_refuses_nothing_and_tells(clock):
    told = []
    limits = Limits(settings.Settings(), clock, alert=told.append)
    caller = a_spender("0.0001", hard=False, alerts_at=(0.5, 1.0, 2.0))
    for number in range(5):
        await ask(limits, caller, 10, 50, f"r{number}", 20)
    assert [(alert.share, alert.spent_micros) for alert in told] == [(0.5, 60), (1.0, 120), (2.0, 240)]
    assert len({alert.id for alert in told}) == 3


async def test_a_new_period_begins_with_nothing_spent(clock):
    now = [1_795_000_000.0]
    limits = Limits(settings.Settings(), clock, wall=lambda: now[0])
    caller = a_spender("0.00006")
    await ask(limits, caller, 10, 50, "a", 20)
    with pytest.raises(BudgetSpent):
        await ask(limits, caller, 10, 50, "b", 20)
    now[0] += 86_400
    await ask(limits, caller, 10, 50, "c", 20)


async def test_a_clock_that_was_ahead_and_is_set_back_makes_no_money_of_another_period(clock):
    now = [1_795_000_000.0]
    limits = Limits(settings.Settings(), clock, wall=lambda: now[0])
    caller = a_spender("0.00006")
    await ask(limits, caller, 10, 50, "a", 20)
    now[0] += 86_400
    await ask(limits, caller, 1, 1, "b", 1)
    now[0] -= 86_400
    with pytest.raises(BudgetSpent):
        await ask(limits, caller, 1, 1, "c", 1)


async def test_money_of_an_open_request_stays_set_aside_however_long_it_takes(limits, clock):
    caller = a_spender("0.001")
    async with limits.admit(caller, DEMO, 40, 5000, "r"):
        for _ in range(20):
            clock.advance(15)
            await limits.renew()
        assert used(limits, caller) == {"tenant budget": 40 + 200 + 10}


async def test_a_ledger_that_is_behind_makes_nothing_unspent(limits):
    caller = a_spender("0.001")
    await ask(limits, caller, 10, 50, "r", 20)
    (budget,) = limits.plans.find(caller, DEMO).budgets
    for restored, spent in ((50, 60), (80, 80), (60, 80)):
        await limits.restore(budget, restored)
        assert used(limits, caller) == {"tenant budget": spent}


async def test_whoever_administers_sees_how_the_ceilings_stand(limits):
    caller = a_caller(
        a_policy(
            tokens_per_minute=100,
            key_limits=Ceilings(requests_per_minute=3),
            model_limits={DEMO: Ceilings(concurrent_requests=2)},
        )
    )
    await ask(limits, caller, 10, 50)
    (reading,) = await limits.peek(caller.policy, caller.tenant_id)
    assert (reading.limit, reading.ceiling, reading.used, reading.reset_ms) == ("tokens_per_minute", 100, 30, 61_000)
    async with limits.admit(caller, DEMO, 10, 10, "open"):
        readings = await limits.peek(caller.policy, caller.tenant_id, caller.key_id, [DEMO, "another"])
        assert [(one.scope, one.model, one.limit, one.used) for one in readings] == [
            ("tenant", "", "tokens_per_minute", 50),
            ("key", "", "requests_per_minute", 2),
            ("model", DEMO, "concurrent_requests", 1),
        ]


@pytest.mark.parametrize("hard", [True, False])
async def test_a_budget_is_seen_with_what_it_holds_until_its_period_ends(clock, hard):
    limits = Limits(settings.Settings(), clock, wall=lambda: 1_795_000_000.0)
    caller = a_spender("0.001", hard=hard)
    await ask(limits, caller, 10, 50, delivered=20)
    async with limits.admit(caller, DEMO, 10, 50, "open"):
        (reading,) = await limits.peek(caller.policy, caller.tenant_id)
    held = 10 + 100 + 10 if hard else 0
    left_ms = 1000 * (86_400 - 1_795_000_000 % 86_400)
    assert (reading.limit, reading.ceiling, reading.used) == ("budget", 1000, 60 + held)
    assert reading.reset_ms == left_ms
