"""What its clients hear of how an upstream's answer ended, in every dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from policies.policy import Cache, Policy
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.elsewhere import Elsewhere, elsewhere, says

ASKED = {"model": "far", "messages": HELLO, "temperature": 0}


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
