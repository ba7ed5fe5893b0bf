"""Tickets over one gateway's own gauges."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from gateway.errors import NeverFits, RateLimited, RequestsLimited, TokensLimited
from gateway.limits.headers import duration
from policies.policy import Limits as Ceilings
from policies.policy import Policy
from policies.terms import Usage
from tests.builders import a_caller
from tests.gateway.limited import DEMO, ESTIMATE, a_policy, ask, limits_of, used


@pytest.fixture
def limits(clock):
    return limits_of(clock)


async def test_an_estimate_is_set_aside_and_what_was_not_used_is_given_back(limits):
    caller = a_caller(a_policy(tokens_per_minute=1000, tokens_per_day=2000))
    async with limits.admit(caller, DEMO, 40, 5000, "r") as ticket:
        assert used(limits, caller) == {"tenant tokens_per_minute": 140, "tenant tokens_per_day": 140}
        assert ticket.covers(ESTIMATE)
        assert not ticket.covers(ESTIMATE + 1)
        ticket.settle(Usage(40, 0, 30))
    assert used(limits, caller) == {"tenant tokens_per_minute": 70, "tenant tokens_per_day": 70}


async def test_no_more_is_set_aside_than_was_asked_for(limits):
    caller = a_caller(a_policy(tokens_per_minute=1000))
    async with limits.admit(caller, DEMO, 40, 8, "r"):
        assert used(limits, caller) == {"tenant tokens_per_minute": 48}


async def test_each_of_several_sequences_has_its_estimate(limits):
    caller = a_caller(a_policy(tokens_per_minute=1000))
    async with limits.admit(caller, DEMO, 40, 5000, "r", num_sequences=3) as ticket:
        assert ticket.covers(3 * ESTIMATE)


async def test_a_long_answer_is_topped_up_until_its_limit_is_reached(limits):
    caller = a_caller(a_policy(tokens_per_minute=250))
    async with limits.admit(caller, DEMO, 40, 5000, "r") as ticket:
        assert await ticket.top_up(ESTIMATE + 1)
        assert ticket.covers(200)
        assert await ticket.top_up(201)
        assert ticket.covers(210)
        assert not ticket.covers(211)
        assert not await ticket.top_up(211)
        ticket.settle(Usage(40, 0, 210))
    assert used(limits, caller) == {"tenant tokens_per_minute": 250}


async def test_what_was_topped_up_and_not_used_is_given_back_at_its_own_instant(limits, clock):
    caller = a_caller(a_policy(tokens_per_minute=1000))
    async with limits.admit(caller, DEMO, 40, 5000, "r") as ticket:
        clock.advance(30)
        assert await ticket.top_up(101)
        ticket.settle(Usage(40, 0, 101))
    assert used(limits, caller) == {"tenant tokens_per_minute": 141}
    clock.advance(31)
    assert used(limits, caller) == {"tenant tokens_per_minute": 1}


async def test_whoever_leaves_without_settling_gives_back_all_tokens_and_the_place(limits):
    caller = a_caller(a_policy(tokens_per_minute=1000, requests_per_minute=5, concurrent_requests=2))
    with pytest.raises(RuntimeError):
        async with limits.admit(caller, DEMO, 40, 5000, "r"):
            raise RuntimeError
    assert used(limits, caller) == {
        "tenant requests_per_minute": 1,
        "tenant tokens_per_minute": 0,
        "tenant concurrent_requests": 0,
    }


@pytest.mark.parametrize("outcome", ["hit", "shared"])
async def test_an_answer_from_a_cache_counts_as_a_request_and_not_as_tokens(limits, outcome):
    caller = a_caller(a_policy(tokens_per_minute=1000, requests_per_minute=5))
    async with limits.admit(caller, DEMO, 40, 30, "r", outcome=outcome) as ticket:
        assert used(limits, caller) == {"tenant requests_per_minute": 1, "tenant tokens_per_minute": 0}
        ticket.settle(Usage(40, 0, 30), outcome)
    assert used(limits, caller) == {"tenant requests_per_minute": 1, "tenant tokens_per_minute": 0}


async def test_a_refusal_says_when_to_come_back_and_the_same_request_passes_then(limits, clock):
    caller = a_caller(a_policy(tokens_per_minute=100))
    await ask(limits, caller, 60, 20, delivered=20)
    clock.advance(20)
    with pytest.raises(TokensLimited) as refused:
        await ask(limits, caller, 30)
    assert (refused.value.status, refused.value.type, refused.value.code) == (429, "tokens", "rate_limit_exceeded")
    assert refused.value.headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "20",
        "x-ratelimit-reset-tokens": "41s",
        "retry-after": "41",
        "retry-after-ms": "41000",
    }
    clock.advance(40.999)
    with pytest.raises(TokensLimited):
        await ask(limits, caller, 30)
    clock.advance(0.001)
    await ask(limits, caller, 30)


async def test_requests_and_places_have_refusals_of_their_own(limits):
    caller = a_caller(a_policy(concurrent_requests=1, requests_per_minute=2))
    async with limits.admit(caller, DEMO, 1, 1, "a"):
        with pytest.raises(RequestsLimited, match=r"concurrent requests: Limit 1, Used 1, Requested 1\. ") as busy:
            await ask(limits, caller, request_id="b")
    assert busy.value.headers()["retry-after"] == "1"
    await ask(limits, caller, request_id="c")
    with pytest.raises(RequestsLimited, match=r"requests per min \(RPM\): Limit 2, Used 2, Requested 1\. ") as often:
        await ask(limits, caller, request_id="d")
    assert often.value.type == "requests"
    assert often.value.headers()["x-ratelimit-remaining-requests"] == "0"


async def test_a_prompt_above_the_whole_limit_is_told_that_it_can_never_pass(limits):
    caller = a_caller(a_policy(tokens_per_minute=100))
    with pytest.raises(NeverFits, match=r"on tokens per min \(TPM\): Limit 100, Requested 101\. ") as refused:
        await ask(limits, caller, 100)
    assert refused.value.headers() == {"x-should-retry": "false"}
    async with limits.admit(caller, DEMO, 99, 5000, "r") as ticket:
        assert ticket.covers(1)
        assert not ticket.covers(2)


async def test_a_refused_request_leaves_no_trace_on_any_ceiling(limits):
    caller = a_caller(a_policy(requests_per_minute=9, key_limits=Ceilings(tokens_per_minute=50), tokens_per_day=900))
    with contextlib.suppress(RateLimited):
        await ask(limits, caller, 10, 30, delivered=30)
        await ask(limits, caller, 10, 30)
    assert used(limits, caller) == {
        "tenant requests_per_minute": 1,
        "tenant tokens_per_day": 40,
        "key tokens_per_minute": 40,
    }


async def test_keys_models_and_tenants_do_not_count_for_each_other(limits):
    policy = a_policy(key_limits=Ceilings(requests_per_minute=1), model_limits={"*": Ceilings(requests_per_minute=2)})
    await ask(limits, a_caller(policy, key_id="key_1"))
    with pytest.raises(RateLimited, match="this API key"):
        await ask(limits, a_caller(policy, key_id="key_1"))
    await ask(limits, a_caller(policy, key_id="key_2"))
    with pytest.raises(RateLimited, match="this project on this model"):
        await ask(limits, a_caller(policy, key_id="key_3"))
    async with limits.admit(a_caller(policy, key_id="key_3"), "another", 1, 1, "r"):
        pass
    await ask(limits, a_caller(policy, tenant_id="ten_2", key_id="key_4"))


async def test_headers_tell_of_the_ceiling_with_the_least_room(limits):
    caller = a_caller(a_policy(tokens_per_minute=1000, tokens_per_day=150, key_limits=Ceilings(requests_per_minute=3)))
    async with limits.admit(caller, DEMO, 10, 50, "r") as ticket:
        assert ticket.headers() == {
            "x-ratelimit-limit-requests": "3",
            "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-reset-requests": "1m1s",
            "x-ratelimit-limit-tokens": "150",
            "x-ratelimit-remaining-tokens": "90",
            "x-ratelimit-reset-tokens": duration(61 * 1_440_000 - 1_000_000 % 1_440_000),
        }


async def test_headers_tell_of_no_less_than_nothing(limits):
    caller = a_caller(a_policy(tokens_per_minute=100))
    await ask(limits, caller, 10, 50, delivered=200)
    with pytest.raises(TokensLimited) as refused:
        await ask(limits, caller)
    assert refused.value.headers()["x-ratelimit-remaining-tokens"] == "0"


async def test_a_tenant_without_ceilings_has_no_headers_and_everything_is_covered(limits):
    caller = a_caller(Policy())
    async with limits.admit(caller, DEMO, 10, 50, "r") as ticket:
        assert ticket.headers() == {}
        assert ticket.covers(10**9)
        assert ticket.settle(Usage(10, 0, 50)) == 0
    assert limits.local.num_gauges == 0


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (12, "12ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (61_000, "1m1s"),
        (360_000, "6m0s"),
        (87_840_000, "24h24m0s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(ms, text):
    assert duration(ms) == text


async def test_a_thousand_requests_at_once_use_no_token_above_the_limit(limits):
    """Against 100,000 tokens in a minute, each wants 300 and delivers what it may."""
    caller = a_caller(a_policy(tokens_per_minute=100_000))
    rng = random.Random(3)
    delivered = []

    async def request(number):
        try:
            async with limits.admit(caller, DEMO, 100, 1000, f"r{number}") as ticket:
                written, wanted = 0, rng.randrange(400)
                while written < wanted and (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                    written += 1
                    if written % 50 == 0:
                        await asyncio.sleep(0)
                ticket.settle(Usage(100, 0, written))
                delivered.append(100 + written)
        except RateLimited as refused:
            return refused.retry_after_s
        return None

    outcomes = await asyncio.gather(*(request(number) for number in range(1000)))
    assert sum(delivered) <= 100_000
    assert sum(delivered) > 90_000
    assert used(limits, caller) == {"tenant tokens_per_minute": sum(delivered)}
    assert all(wait_s is None or 0 < wait_s <= 61 for wait_s in outcomes)
    assert limits.open_tickets == {}


async def test_open_requests_keep_their_places_however_long_they_take(limits, clock):
    caller = a_caller(a_policy(concurrent_requests=1))
    async with limits.admit(caller, DEMO, 1, 1, "a"):
        for _ in range(20):
            clock.advance(15)
            await limits.renew()
        assert used(limits, caller) == {"tenant concurrent_requests": 1}
    assert used(limits, caller) == {"tenant concurrent_requests": 0}


async def test_leases_are_renewed_by_themselves_while_it_is_open(limits, clock):
    caller = a_caller(a_policy(concurrent_requests=1))
    async with limits.watched(), limits.admit(caller, DEMO, 1, 1, "a"):
        for _ in range(20):
            await asyncio.sleep(0)
            clock.advance(15)
            await asyncio.sleep(0)
        assert used(limits, caller) == {"tenant concurrent_requests": 1}


async def test_gauges_that_say_nothing_any_more_are_dropped(limits, clock):
    policy = a_policy(tokens_per_minute=1000, concurrent_requests=3, key_limits=Ceilings(requests_per_minute=9))
    for number in range(500):
        await ask(limits, a_caller(policy, tenant_id=f"ten_{number}", key_id=f"key_{number}"))
    assert limits.local.num_gauges == 1500
    clock.advance(62)
    for _ in range(800):
        with contextlib.suppress(RateLimited):
            await ask(limits, a_caller(policy, tenant_id="ten_x", key_id="key_x"))
    assert limits.local.num_gauges == 3
