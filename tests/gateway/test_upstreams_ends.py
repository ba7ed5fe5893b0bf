"""What its clients hear of how an upstream's answer ended, in every dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pydantic
import pytest
from aiohttp import web

from policies.policy import Cache, Policy
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.elsewhere import USAGE, Elsewhere, Heard, chunk, elsewhere, event, says
from tests.gateway.elsewhere import streams as events_of

CHAT = "/v1/chat/completions"
ASKED = {"model": "far", "messages": HELLO, "temperature": 0}


class Weather(pydantic.BaseModel):
    city: str


@pytest.fixture
async def far() -> AsyncIterator[Elsewhere]:
    async with elsewhere() as server:
        yield server


@pytest.fixture
async def front(open_front: OpenFront, far: Elsewhere) -> AsyncIterator[Front]:
    policies = {"default": Policy(cache=Cache(exact="all"))}
    async with open_front(policies=policies, upstreams=(far.upstream(),)) as opened:
        yield opened


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_a_filter_cut_says_so_in_every_dialect_and_is_not_kept(front, far, streams):
    far.always = says("one ", finish="content_filter")
    if streams:
        chunks = [each async for each in await front.client.chat.completions.create(**ASKED, stream=True)]
        assert [each.choices[0].finish_reason for each in chunks][-2:] == [None, "content_filter"]
        chunks = [each async for each in await front.client.completions.create(model="far", prompt="a", stream=True)]
        assert chunks[-1].choices[0].finish_reason == "content_filter"
        events = [each async for each in await front.client.responses.create(model="far", input="Hi", stream=True)]
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
        body = {**ASKED, "max_tokens": 9, "stream": True}
        async with front.http.post(f"{front.url}/v1/messages", json=body) as answer:
            events = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: ")]
        (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
        assert delta["stop_reason"] == "refusal"
    else:
        chat = await front.client.chat.completions.create(**ASKED)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one ", "content_filter")
        completion = await front.client.completions.create(model="far", prompt="a")
        assert completion.choices[0].finish_reason == "content_filter"
        response = await front.client.responses.create(model="far", input="Hi")
        status, message, _ = await front.post("/v1/messages", {**ASKED, "max_tokens": 9})
        assert (status, message["stop_reason"]) == (200, "refusal")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")
    assert response.output[0].status == "incomplete"
    assert {row["finish_reason"] for row in await front.settled(4)} == {"content_filter"}

    far.always = says("one ", "two")
    again = await front.client.chat.completions.create(**ASKED)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("one two", "stop")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_refusal_stays_apart_from_what_was_asked_for(front, far, streams):
    if streams:
        far.always = events_of(*[chunk(refusal=each) for each in ("I will ", "not.")], chunk(finish="stop"), "[DONE]")
        async with front.client.chat.completions.stream(**ASKED, response_format=Weather) as said:
            deltas = [event.delta async for event in said if event.type == "refusal.delta"]
            assert "".join(deltas) == "I will not."
            (choice,) = (await said.get_final_completion()).choices
        async with front.client.responses.stream(model="far", input="Hi", text_format=Weather) as told:
            deltas = [event.delta async for event in told if event.type == "response.refusal.delta"]
            assert "".join(deltas) == "I will not."
            response = await told.get_final_response()
    else:
        message = {"role": "assistant", "content": None, "refusal": "I will not."}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]

        async def answer(heard: Heard) -> web.Response:
            return web.json_response({"choices": choices, "usage": USAGE})

        far.always = answer
        (choice,) = (await front.client.chat.completions.parse(**ASKED, response_format=Weather)).choices
        response = await front.client.responses.parse(model="far", input="Hi", text_format=Weather)
    assert (choice.message.refusal, choice.message.parsed, choice.finish_reason) == ("I will not.", None, "stop")
    assert choice.message.content is None
    (part,) = response.output[0].content
    assert (part.type, part.refusal, response.status) == ("refusal", "I will not.", "completed")
    assert response.output_parsed is None
    await front.settled(2)

    status, message, _ = await front.post("/v1/messages", {**ASKED, "max_tokens": 9})
    assert (status, message["content"]) == (200, [{"type": "text", "text": "I will not."}])
    status, told, _ = await front.post("/api/chat", {**ASKED, "stream": False})
    assert (status, told["message"]["content"]) == (200, "I will not.")


async def test_whoever_asks_for_too_much_has_it_counted_against_no_upstream(open_front):
    long = says("x" * 20_000)

    async def goes_on(heard):
        response = await heard.stream()
        while True:
            await event(response, chunk(content="on "))
            await asyncio.sleep(0.01)

    async with elsewhere() as far:
        terms = far.upstream(breaker_failures=1, max_answer_bytes=1 << 14, timeout_s=0.5)
        async with open_front(upstreams=(terms,)) as front:
            for behaviour, streams, code in (
                (long, False, "upstream_failed"),
                (long, True, "upstream_failed"),
                (goes_on, True, "upstream_timeout"),
            ):
                far.scripts = [behaviour]
                async with front.http.post(front.url + CHAT, json={**ASKED, "stream": streams}) as answer:
                    said = await answer.text()
                    assert code in said, said
                    assert answer.headers.get("x-should-retry") == (None if behaviour is goes_on else "false")
            assert len(far.heard) == 3
            view = front.gw.upstreams.view("far-1")
            assert (view.state, view.num_failed, view.num_openings) == ("closed", 3, 0)
            assert (await front.post(CHAT, ASKED))[0] == 200
