"""What an upstream says of its usage, in all the places where upstreams say it: what is told on is what is billed."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal

import msgspec
import pytest
from aiohttp import web

from gateway.upstreams.reading import ToldUsage
from policies import settings
from policies.policy import Budget, Cache, Policy, Price
from tests.gateway.conftest import HELLO, OpenFront
from tests.gateway.elsewhere import USAGE, Heard, chunk, elsewhere, says, streams

ASKED = {"model": "far", "messages": HELLO}
END = [chunk(content="one"), chunk(finish="stop")]
COUNTING = [{**each, "usage": {"prompt_tokens": 21, "completion_tokens": 1}} for each in END]
"""As of those that say with each word how many there were so far."""


@pytest.mark.parametrize("last", [{}, None, {"prompt_tokens": 21}, {"prompt_tokens": None, "completion_tokens": None}])
@pytest.mark.parametrize("end", [END, COUNTING])
async def test_the_last_count_stands_whatever_is_said_behind_it(open_front: OpenFront, end, last):
    said = [*end, {"choices": [], "usage": USAGE}, {"choices": [], "usage": last}, "[DONE]"]
    async with elsewhere(streams(*said)) as far, open_front(upstreams=(far.upstream(),)) as front:
        asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
        async with front.http.post(f"{front.url}/v1/chat/completions", json=asked) as answer:
            lines = (await answer.text()).split("\n\n")
        usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
        (row,) = await front.settled(1)
        counts = (row["num_prompt_tokens"], row["num_completion_tokens"], row["num_cached_tokens"])
        assert (counts, row["counted_by"]) == ((21, 3, 5), "upstream")
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (21, 3)


@pytest.mark.parametrize(("said", "told"), [(0, 0), (4, 4), (5, 5), (300, 5), (-3, 0), (None, 0)])
def test_no_more_of_a_count_was_cached_or_thought_than_there_was(said, told):
    details = {
        "prompt_tokens_details": {"cached_tokens": said},
        "completion_tokens_details": {"reasoning_tokens": said},
    }
    usage = msgspec.convert({"prompt_tokens": 5, "completion_tokens": 5, **details}, ToldUsage)
    assert (usage.num_cached_tokens, usage.num_reasoning_tokens) == (told, told)


async def test_vectors_have_no_completion_that_could_be_billed(open_front: OpenFront):
    async def answer(heard: Heard) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
        return web.json_response({"data": [{"index": 0, "embedding": [0.5]}], "usage": usage})

    async with elsewhere(answer) as far, open_front(upstreams=(far.upstream(),)) as front:
        found = await front.client.embeddings.create(model="far", input="a")
        (row,) = await front.settled(1)
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (7, 7)
        assert (row["num_prompt_tokens"], row["num_completion_tokens"], row["counted_by"]) == (7, 0, "upstream")


@pytest.mark.parametrize("several", [{"messages": HELLO, "n": 2}, {"prompt": ["a", "b"]}])
@pytest.mark.parametrize("streams", [False, True])
async def test_several_answers_end_together_where_the_budget_does(open_front: OpenFront, several, streams):
    price = Price(completion=Decimal(1_000_000))
    policy = Policy(budget=Budget(Decimal(8), "month"), prices={"*": price}, cache=Cache("off"))
    terms = {"limits": settings.Limits(completion_estimate=1), "policies": {"default": policy}}
    async with elsewhere(says(*["one "] * 50)) as far, open_front(upstreams=(far.upstream(),), **terms) as front:
        path = "/v1/chat/completions" if "messages" in several else "/v1/completions"
        asked = {"model": "far", "stream": streams, "max_tokens": 60, **several}
        async with front.http.post(front.url + path, json=asked) as answer:
            text = await answer.text()
        (row,) = await front.settled(1)
        assert (answer.status, row["status"], row["finish_reason"]) == (200, 200, "length")
        assert text.count('"finish_reason":"length"') == 2
        assert row["cost_micros"] == 1_000_000 * row["num_completion_tokens"] <= 8_000_000


async def test_what_an_upstream_had_of_a_prompt_is_on_the_bill_of_the_one_who_pays(open_front: OpenFront):
    gap, terms = asyncio.Event(), {"policies": {"default": Policy(cache=Cache("all"))}}
    async with (
        elsewhere(says("one ", "two", gap=gap)) as far,
        open_front(upstreams=(far.upstream(),), **terms) as front,
    ):
        path, asked = f"{front.url}/v1/chat/completions", {**ASKED, "stream": True}
        async with front.http.post(path, json=asked) as one, front.http.post(path, json=asked) as other:
            for answer in (one, other):
                await answer.content.readuntil(b"one ")
            gap.set()
            for answer in (one, other):
                await answer.read()
        again = await front.client.chat.completions.create(**ASKED)
        rows = await front.settled(3)
        assert {row["cache"]: row["num_cached_tokens"] for row in rows} == {"miss": 5, "shared": 0, "hit": 0}
        assert (again.usage.prompt_tokens, again.usage.prompt_tokens_details.cached_tokens) == (21, 0)
