"""What a client sees of its limits and its budget, through OpenAI's own client."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import openai
import pytest

from policies import settings
from policies.policy import Budget, Limits, Policy, Price

HELLO = [{"role": "user", "content": "Hello"}]


def policy_of(**words: object) -> dict[str, object]:
    return {"policies": {"default": Policy(**words)}}  # type: ignore[arg-type]


async def test_every_answer_says_how_much_is_left(start_house):
    house = start_house("--num-tokens", 5, **policy_of(limits=Limits(requests_per_minute=10, tokens_per_minute=10_000)))
    async with house.client() as client:
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=8)
        num_prompt_tokens = raw.parse().usage.prompt_tokens
        assert raw.headers["x-ratelimit-limit-requests"] == "10"
        assert raw.headers["x-ratelimit-remaining-requests"] == "9"
        assert raw.headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 10_000 - num_prompt_tokens - 8
        # What was set aside and not used has come back by the next request.
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=8)
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 2 * num_prompt_tokens - 5 - 8


async def test_one_request_too_many_is_told_when_to_come_back(start_house):
    house = start_house("--num-tokens", 1, **policy_of(limits=Limits(requests_per_minute=2)))
    async with house.client() as client:
        for _ in range(2):
            await client.chat.completions.create(model="demo", messages=HELLO)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO)
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
    headers = refused.value.response.headers
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < int(headers["retry-after-ms"]) <= 61_000  # a window leaves a slot at a time
    assert 0 < int(headers["retry-after"]) <= 61


async def test_a_stream_tops_up_what_was_set_aside_for_it(start_house):
    house = start_house(
        **policy_of(limits=Limits(tokens_per_minute=1_000)), limits=settings.Limits(completion_estimate=16)
    )
    async with house.client() as client:
        answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=200)
        assert answer.usage.completion_tokens == 200
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=1)
        used = 200 + 2 * answer.usage.prompt_tokens + 1
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 1_000 - used


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_answer_ends_at_the_ceiling_and_owes_what_was_delivered(start_house, stream, num_choices):
    house = start_house(
        **policy_of(limits=Limits(tokens_per_minute=150)), limits=settings.Limits(completion_estimate=16)
    )
    body = {"model": "demo", "messages": HELLO, "max_tokens": 400, "n": num_choices}
    async with house.client() as client:
        if stream:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await client.chat.completions.create(**body, **options)]
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
            usage = chunks[-1].usage
        else:
            answer = await client.chat.completions.create(**body)
            reasons, usage = [choice.finish_reason for choice in answer.choices], answer.usage
    assert reasons == ["length"] * num_choices
    assert usage.total_tokens == 150
    await house.quiet()
    (row,) = await house.ledger_rows()
    assert (row.num_prompt_tokens, row.num_completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert (row.status, row.finish_reason) == (200, "length")
    assert await house.num_used_blocks() == 0


async def test_a_hard_budget_ends_the_answer_that_spends_it_and_refuses_the_next(start_house):
    # A unit a million tokens is a micro-unit a token.
    budget, price = Budget(amount=Decimal("0.000100")), Price(prompt=Decimal(1), completion=Decimal(1))
    house = start_house(**policy_of(budget=budget, prices={"*": price}), limits=settings.Limits(completion_estimate=16))
    async with house.client() as client:
        answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=400)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == 100
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
    assert refused.value.code == "insufficient_quota"
    assert refused.value.response.headers["x-should-retry"] == "false"
    rows = await house.ledger_rows(status=200)
    assert [row.cost_micros for row in rows] == [100]


async def test_a_keys_own_budget_ends_the_answer_that_spends_it_and_refuses_that_key_alone(start_house):
    price = Price(prompt=Decimal(1), completion=Decimal(1))
    house = start_house(
        **policy_of(budget=Budget(amount=Decimal(1)), prices={"*": price}),
        limits=settings.Limits(completion_estimate=16),
    )
    tenant = next(iter(house.gw.directory.tenants())).id
    async with house.http(house.admin_key) as session:
        body = {"tenant_id": tenant, "name": "own", "narrowing": {"budget": {"amount": "0.0001", "period": "week"}}}
        async with session.post("/admin/v1/keys", json=body) as made:
            key = (await made.json())["key"]
    async with house.client(key) as client:
        stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=400, stream=True)
        reasons = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        assert reasons[-1] == "length"
        with pytest.raises(
            openai.RateLimitError, match="the budget of this API key for the period is spent"
        ) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
    assert refused.value.code == "insufficient_quota"
    async with house.client() as client:
        await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
    rows = await house.ledger_rows(status=200)
    assert max(row.cost_micros for row in rows) == 100


async def test_an_answer_from_the_cache_takes_no_tokens_and_costs_what_the_policy_says(start_house):
    price = Price(prompt=Decimal(1), completion=Decimal(2), cache_hit=Decimal("0.5"))
    house = start_house("--num-tokens", 4, **policy_of(limits=Limits(tokens_per_minute=1_000), prices={"demo": price}))
    body = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 10}
    async with house.client() as client:
        first = await client.chat.completions.with_raw_response.create(**body)
        second = await client.chat.completions.with_raw_response.create(**body)
        usage = first.parse().usage
        assert (first.headers["x-penstock-cache"], second.headers["x-penstock-cache"]) == ("miss", "hit")
        assert int(second.headers["x-ratelimit-remaining-tokens"]) == 1_000 - usage.total_tokens
    rows = await house.ledger_rows()
    costs = {row.cache: row.cost_micros for row in rows}
    assert costs["miss"] == usage.prompt_tokens + 2 * usage.completion_tokens
    assert costs["hit"] == round(usage.total_tokens / 2)


@pytest.mark.parametrize("max_tokens", [10, 60])
async def test_answers_from_the_cache_at_once_spend_a_budget_to_its_end_and_no_further(start_house, max_tokens):
    price = Price(prompt=Decimal(1), completion=Decimal(1), cache_hit=Decimal(1))
    house = start_house(
        **policy_of(budget=Budget(amount=Decimal("0.001000")), prices={"*": price}),
        limits=settings.Limits(completion_estimate=16),
    )
    body = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": max_tokens}

    async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
        try:
            answer = await client.chat.completions.create(**body, stream=stream)
            if stream:
                async for chunk in answer:
                    if chunk.choices and chunk.choices[0].finish_reason:
                        return "answered"
        except openai.RateLimitError as refused:
            return refused.code
        return "answered"

    async with house.client() as client:
        # The first ones read along, the later ones find it.
        outcomes = await asyncio.gather(*(ask(client, bool(number % 2)) for number in range(6)))
        for _ in range(4):
            outcomes += await asyncio.gather(*(ask(client, bool(number % 2)) for number in range(16)))
    assert set(outcomes) - {"rate_limit_exceeded"} == {"answered", "insufficient_quota"}
    await house.quiet()
    rows = await house.ledger_rows(status=200)
    assert {row.cache for row in rows} >= {"miss", "hit"}
    spent, whole = sum(row.cost_micros for row in rows), max(row.cost_micros for row in rows)
    assert 1000 - whole < spent <= 1000


async def test_a_prompt_that_no_window_holds_is_not_worth_another_try(start_house):
    house = start_house(**policy_of(limits=Limits(tokens_per_minute=3)))
    async with house.client() as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO)
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_a_request_that_fails_gives_back_what_was_set_aside(start_house):
    house = start_house("--fault", "refuse", **policy_of(limits=Limits(tokens_per_minute=1_000, concurrent_requests=1)))
    async with house.client() as client:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=100)
    readings = await house.inside(
        house.gw.limits.peek(
            Policy(limits=Limits(tokens_per_minute=1_000)), next(iter(house.gw.directory.tenants())).id
        )
    )
    assert [reading.used for reading in readings] == [0]
