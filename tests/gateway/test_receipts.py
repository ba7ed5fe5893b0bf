"""What a request cost and where its time went, told to its client; read through OpenAI's own client."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import ReceiptAmount
from gateway.reply.receipt import receipt
from gateway.spent import Spent
from policies import settings
from policies.policy import Policy, Price
from tests.builders import an_entry
from tests.gateway.conftest import HELLO, Front

WANTED = {"extra_headers": {"x-penstock-receipt": "true"}}
TIMES = {"queue_s": 0.0001, "prefill_s": 0.0002, "decode_s": 0.0003}
SPENT = {**TIMES, "engine_s": 0.0123456, "kv_block_s": 1.5, "num_drafted_tokens": 8, "num_accepted_tokens": 5}


def priced(**price: Decimal) -> dict[str, object]:
    return {"policies": {"default": Policy(prices={"*": Price(**price)})}, "billing": settings.Billing(currency="EUR")}


def assert_adds_up(told):
    parts = [told[name] for name in ("queue_ms", "prefill_ms", "decode_ms", "gateway_ms")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(told["total_ms"], abs=1e-6)


async def test_a_body_has_a_receipt_that_adds_up_and_agrees_with_the_row(open_front):
    async with open_front(**priced(prompt=Decimal(2), completion=Decimal(3))) as front:
        call = front.chat(**WANTED)
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop", num_cached_tokens=1, **SPENT)
        answer = await call
        told = answer.penstock["receipt"]
        assert_adds_up(told)
        assert (told["prefill_ms"], told["decode_ms"]) == (0.2, 0.3)
        assert 0.1 <= told["queue_ms"] < told["total_ms"]
        (row,) = front.rows()
        assert told["request_id"] == row["request_id"]
        assert told["total_ms"] >= row["duration_ms"]
        assert told["prompt_tokens"] == answer.usage.prompt_tokens == row["num_prompt_tokens"]
        assert told["completion_tokens"] == answer.usage.completion_tokens
        assert (told["cached_tokens"], told["drafted_tokens"], told["accepted_tokens"]) == (1, 8, 5)
        assert (told["engine_seconds"], told["kv_block_seconds"]) == (0.012346, 1.5)
        assert told["cost"] == {"value": f"0.{row['cost_micros']:06}", "currency": "EUR"}
        assert row["cost_micros"] > 0
        assert told["price_version"] == row["price_version"] != ""


@pytest.mark.parametrize("includes_usage", [True, False])
async def test_a_stream_has_it_in_its_last_chunk(front: Front, includes_usage: bool):
    call = front.chat(stream=True, stream_options={"include_usage": includes_usage}, **WANTED)
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi"), 3], "stop", **SPENT)
    *chunks, last = [chunk async for chunk in await call]
    assert not any(hasattr(chunk, "penstock") for chunk in chunks)
    assert last.choices == []
    assert (last.usage is not None) == includes_usage
    assert_adds_up(last.penstock["receipt"])
    assert last.penstock["receipt"]["completion_tokens"] == len(front.ids("Hi")) + 1


async def test_the_streaming_helper_of_the_client_reads_past_it(front: Front):
    async with front.client.chat.completions.stream(model="demo", messages=HELLO, **WANTED) as stream:
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop")
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hi"


@pytest.mark.parametrize("streams", [True, False])
async def test_the_body_of_a_request_may_ask_for_it_too(front: Front, streams: bool):
    asked = {"prompt": "One", "extra_body": {"penstock": {"receipt": True}}}
    call = asyncio.create_task(front.client.completions.create(model="demo", stream=streams, **asked))
    front.peer.say(await front.peer.submitted(), front.ids(" two"), "length")
    answer = await call
    if streams:
        answer = [chunk async for chunk in answer][-1]
    assert_adds_up(answer.penstock["receipt"])


async def test_nobody_else_gets_one(front: Front):
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    front.peer.say(await front.peer.submitted(), [3], "stop")
    assert "penstock" not in (await call)[1]


async def test_an_answer_from_the_cache_costs_what_it_says_and_no_engine_time(open_front):
    async with open_front(**priced(completion=Decimal(3), cache_hit=Decimal(1))) as front:
        call = front.chat(temperature=0, **WANTED)
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop", **SPENT)
        first = (await call).penstock["receipt"]
        again = (await front.chat(temperature=0, **WANTED)).penstock["receipt"]
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    assert again["engine_seconds"] == again["prefill_ms"] == again["decode_ms"] == 0
    assert again["gateway_ms"] == again["total_ms"]
    assert again["cost"]["value"] == f"0.{again['prompt_tokens'] + again['completion_tokens']:06}"


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"x-penstock-receipt": "maybe"}, {}, "x-penstock-receipt"),
        ({}, {"penstock": {"receipt": "yes"}}, "penstock.receipt"),
        ({}, {"penstock": True}, "penstock"),
    ],
)
async def test_what_is_no_answer_to_the_question_is_refused_by_name(front: Front, headers, body, param):
    status, answer, _ = await front.post(
        "/v1/chat/completions", {"model": "demo", "messages": HELLO, **body}, **headers
    )
    assert (status, answer["error"]["param"]) == (400, param)
    assert front.peer.is_quiet()


seconds = st.floats(0, 1e5)


@given(seconds, seconds, seconds, seconds)
def test_the_parts_add_up_whatever_the_worker_says(queue_s, prefill_s, decode_s, total_s):
    spent = Spent(queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s)
    told = receipt(an_entry(), spent, total_s, "USD")
    assert_adds_up({name: getattr(told, name) for name in told.__struct_fields__})
    assert told.total_ms == pytest.approx(1e3 * total_s, abs=1e-3)


@given(st.integers(0, 10**15))
def test_an_amount_is_exact(micros):
    value = ReceiptAmount.of(micros, "USD").value
    assert Decimal(value) * 1_000_000 == micros
    assert "E" not in value
