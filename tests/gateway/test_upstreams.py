"""A model that an upstream answers for, as its clients see it: in every dialect, with limits, cache and ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest

from policies import settings, wire
from policies.policy import Cache, Policy
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import ADMIN_KEY, HELLO, Front, OpenFront
from tests.gateway.elsewhere import Elsewhere, chunk, elsewhere, fails, hangs, says, several, stalls, streams

ASKED = {"model": "far", "messages": HELLO}


@pytest.fixture
async def far() -> AsyncIterator[Elsewhere]:
    async with elsewhere() as server:
        yield server


@pytest.fixture
async def front(open_front: OpenFront, far: Elsewhere) -> AsyncIterator[Front]:
    async with open_front(upstreams=(far.upstream(upstream_model="theirs"),)) as opened:
        yield opened


async def events(front: Front, path: str, body: dict) -> list:
    async with front.http.post(front.url + path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line async for line in answer.content]
    data = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    return [json.loads(each) for each in data if each != b"[DONE]"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat_is_answered_settled_and_paid_by_the_upstreams_count(front, far, streams):
    if streams:
        said = await front.client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
        chunks = [each async for each in said]
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        usage, finish = chunks[-1].usage, chunks[-2].choices[0].finish_reason
        assert far.bodies[0]["stream_options"] == {"include_usage": True}
    else:
        whole = await front.client.chat.completions.create(**ASKED, user="ann", metadata={"a": "b"})
        text, usage, finish = whole.choices[0].message.content, whole.usage, whole.choices[0].finish_reason
        assert whole.model == "far"
        assert not {"user", "metadata", "penstock", "service_tier"} & far.bodies[0].keys()
    assert (text, finish) == ("one two three", "stop")
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (21, 3, 5)
    assert far.bodies[0]["model"] == "theirs"
    assert far.bodies[0]["messages"] == HELLO
    (row,) = await front.settled(1)
    assert (row["num_prompt_tokens"], row["num_cached_tokens"], row["num_completion_tokens"]) == (21, 5, 3)
    assert (row["upstream"], row["counted_by"], row["model"], row["status"]) == ("far-1", "upstream", "far", 200)


@pytest.mark.parametrize("is_salted", [True, False])
async def test_one_that_takes_salts_gets_the_tenants_own(open_front, far, is_salted):
    async with open_front(upstreams=(far.upstream(cache_salt=is_salted),)) as front:
        for path, body in ("chat/completions", ASKED), ("completions", {"model": "far", "prompt": "Hello"}):
            for own in ({}, {}, {"cache_salt": "ann"}):
                await front.post(f"/v1/{path}", {**body, **own})
            first, again, anns = (each.get("cache_salt") for each in far.bodies[-3:])
            assert first == again
            if is_salted:
                assert len(first) == len(anns) == 64
                assert first != anns != "ann", "another tenant may say the same"
            else:
                assert (first, anns) == (None, "ann")


async def test_it_is_a_model_like_others(front):
    models = [model.id async for model in await front.client.models.list()]
    assert models == ["demo", "far"]
    call = front.chat()
    front.peer.say(await front.peer.submitted(), front.ids("Hi"), "stop")
    await call
    (row,) = await front.settled(1)
    assert (row["upstream"], row["counted_by"]) == (None, None)


async def test_every_dialect_is_answered(front, far):
    status, message, _ = await front.post("/v1/messages", {**ASKED, "max_tokens": 9})
    assert (status, message["content"]) == (200, [{"type": "text", "text": "one two three"}])
    assert message["usage"]["input_tokens"] == 16
    told = await events(front, "/v1/messages", {**ASKED, "max_tokens": 9})
    texts = [each["delta"]["text"] for each in told if each["type"] == "content_block_delta"]
    assert "".join(texts) == "one two three"

    response = await front.client.responses.create(model="far", input="Hello")
    assert response.output_text == "one two three"
    told = await events(front, "/v1/responses", {"model": "far", "input": "Hello"})
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "one two three"

    status, chat, _ = await front.post("/api/chat", {**ASKED, "stream": False})
    assert (status, chat["message"]["content"], chat["eval_count"]) == (200, "one two three", 3)
    async with front.http.post(f"{front.url}/api/generate", json={"model": "far", "prompt": "Hello"}) as answer:
        lines = [json.loads(line) async for line in answer.content]
    assert "".join(line["response"] for line in lines) == "one two three"

    completion = await front.client.completions.create(model="far", prompt=["a", "b"])
    assert [choice.text for choice in completion.choices] == ["one two three"] * 2
    assert completion.usage.completion_tokens == 6
    told = await events(front, "/v1/completions", {"model": "far", "prompt": "a"})
    assert "".join(each["choices"][0]["text"] for each in told if each["choices"]) == "one two three"
    rows = await front.settled(8)
    assert {row["upstream"] for row in rows} == {"far-1"}


async def test_calls_reasoning_and_logprobs_come_through(front, far):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": each}} for each in ('{"a":', " 1}")]
    call = [
        chunk(role="assistant", reasoning_content="hm "),
        chunk(tool_calls=[begun]),
        *[chunk(tool_calls=[part]) for part in parts],
        chunk(finish="tool_calls"),
        "[DONE]",
    ]
    far.always = streams(*call)
    said = await front.client.chat.completions.create(**ASKED, tools=tools, stream=True)
    chunks = [each async for each in said]
    deltas = [each.choices[0].delta for each in chunks if each.choices]
    calls = [each for delta in deltas for each in delta.tool_calls or ()]
    assert (calls[0].id, calls[0].function.name) == ("call_1", "add")
    assert "".join(each.function.arguments or "" for each in calls) == '{"a": 1}'
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm "
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert far.bodies[0]["tools"] == tools

    status, message, _ = await front.post("/v1/messages", {**ASKED, "max_tokens": 9})
    assert status == 200
    kinds = {"thinking": "hm ", "tool_use": {"a": 1}}
    assert {each["type"]: each.get("thinking", each.get("input")) for each in message["content"]} == kinds

    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    answer = chunk(content="Hi")
    answer["choices"][0]["logprobs"] = {"content": [entry]}
    far.always = streams(answer, chunk(finish="stop"), "[DONE]")
    told = await events(front, "/v1/chat/completions", {**ASKED, "logprobs": True})
    assert [each["choices"][0]["logprobs"] for each in told if each["choices"][0]["logprobs"]] == [
        {"content": [entry], "refusal": None}
    ]
    await events(front, "/v1/chat/completions", {**ASKED, "top_logprobs": 0})
    assert "top_logprobs" not in far.bodies[-1], "some refuse it there"


async def test_calls_that_are_all_counted_as_the_first_one_are_told_apart(front, far):
    named = [("call_a", "get", '{"a":1}'), ("call_b", "put", "{"), ("call_b", "put", "}")]
    calls = [{"index": 0, "id": id, "function": {"name": name, "arguments": text}} for id, name, text in named]
    far.always = streams(*[chunk(tool_calls=[call]) for call in calls], chunk(finish="tool_calls"), "[DONE]")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("get", "put")
    ]
    whole = await front.client.chat.completions.create(**ASKED, tools=tools)
    found = [(call.id, call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls]
    assert found == [("call_a", "get", '{"a":1}'), ("call_b", "put", "{}")]


async def test_vectors_and_scores_come_from_an_upstream(open_front):
    async with elsewhere() as far, open_front(upstreams=(far.upstream(kinds=("embeddings", "rerank")),)) as front:

        async def answer(heard):
            from aiohttp import web

            if "query" in heard.body:
                results = [{"index": index, "relevance_score": index / 4} for index in range(3)]
                return web.json_response({"results": results, "usage": {"prompt_tokens": 11, "total_tokens": 11}})
            data = [{"index": i, "embedding": [float(i), 0.5]} for i in range(len(heard.body["input"]))]
            return web.json_response({"data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}})

        far.always = answer
        found = await front.client.embeddings.create(model="far", input=["a", "b"])
        assert [each.embedding for each in found.data] == [[0.0, 0.5], [1.0, 0.5]]
        assert found.usage.prompt_tokens == 7
        status, ranking, _ = await front.post(
            "/v1/rerank", {"model": "far", "query": "q", "documents": ["a", "b", "c"], "top_n": 2}
        )
        assert (status, [each["index"] for each in ranking["results"]]) == (200, [2, 1])
        status, refused, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, refused["error"]["param"]) == (400, "model")
        rows = await front.settled(2)
        assert [row["num_prompt_tokens"] for row in rows] == [7, 11]


@pytest.mark.parametrize(
    ("usage", "told"),
    [({"total_tokens": 11}, (11, "upstream")), ({"prompt_tokens": None}, (2, "gateway")), ({}, (2, "gateway"))],
)
async def test_of_an_answer_without_a_completion_the_total_is_the_prompts(open_front, usage, told):
    async with elsewhere() as far, open_front(upstreams=(far.upstream(kinds=("rerank",)),)) as front:

        async def answer(heard):
            from aiohttp import web

            return web.json_response({"results": [{"index": 0, "relevance_score": 0.5}], "usage": usage})

        far.always = answer
        assert (await front.post("/v1/rerank", {"model": "far", "query": "q", "documents": ["a"]}))[0] == 200
        (row,) = await front.settled(1)
        assert (row["num_prompt_tokens"], row["counted_by"]) == told


async def test_equal_questions_are_asked_once(open_front, far):
    policy = {"default": Policy(cache=Cache(exact="all"))}
    async with open_front(upstreams=(far.upstream(),), policies=policy) as front:
        first = await front.client.chat.completions.create(**ASKED)
        async with front.http.post(f"{front.url}/v1/chat/completions", json=ASKED) as answer:
            assert answer.headers["x-penstock-cache"] == "hit"
            again = await answer.json()
        assert again["choices"][0]["message"]["content"] == first.choices[0].message.content == "one two three"
        assert again["usage"]["prompt_tokens"] == 21
        await front.client.chat.completions.create(**ASKED, tool_choice="none", temperature=0.5)
        assert len(far.heard) == 2


async def test_whoever_hangs_up_hangs_up_on_the_upstream(front, far):
    far.always = stalls("one ", "two ")
    async with front.http.post(f"{front.url}/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
        await answer.content.readline()
    async with asyncio.timeout(PATIENCE_S):
        await far.heard[0].gone.wait()
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"], row["counted_by"]) == (499, "cancelled", "gateway")
    assert row["num_completion_tokens"] <= 2
    far.always = hangs
    far.came.clear()
    asking = asyncio.create_task(front.client.chat.completions.create(**ASKED))
    await far.came.wait()
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await far.heard[1].gone.wait()
    await front.settled(2)


async def test_whoever_leaves_twice_while_two_are_asked_leaves_room_at_both(open_front):
    async with several(2) as (slow, other):
        upstreams = (slow.upstream("a", hedge=True), other.upstream("b", priority=1))
        async with open_front(upstreams=upstreams) as front:
            for _ in range(20):  # until it is known how long it takes
                await front.client.chat.completions.create(**ASKED)
            slow.always = other.always = hangs
            asking = asyncio.create_task(front.client.chat.completions.create(**ASKED))
            await until(lambda: other.heard)
            pool = front.gw.upstreams.of("far")
            (call,) = pool.flights()
            call.close()
            await asyncio.sleep(0)  # it is hanging up on the first
            pool.abandon(call)
            with pytest.raises(openai.APIStatusError):
                await asking
            await until(lambda: not pool.num_open)
            assert [front.gw.upstreams.view(name).num_open for name in "ab"] == [0, 0]


async def test_a_stop_string_that_the_upstream_does_not_know_ends_the_answer_here(front, far):
    far.always = stalls("one ", "two ", "three ", "four ")
    said = await front.client.chat.completions.create(**ASKED, stream=True, stop=["three"])
    chunks = [each async for each in said]
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"
    async with asyncio.timeout(PATIENCE_S):
        await far.heard[0].gone.wait()
    (row,) = await front.settled(1)
    assert (row["num_completion_tokens"] <= 4, row["counted_by"]) == (True, "gateway")


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": 21, "completion_tokens": None}, {"prompt_tokens": "21"}, [21, 3]]
)
async def test_without_usage_our_own_count_is_billed_and_marked(front, far, usage):
    far.always = says("one two three four", usage=usage)
    status, body, _ = await front.post("/v1/chat/completions", ASKED)
    assert (status, body["usage"]["completion_tokens"]) == (200, 5)
    (row,) = await front.settled(1)
    assert (row["counted_by"], row["num_completion_tokens"]) == ("gateway", 5)
    assert front.gw.upstreams.view("far-1").num_without_usage == 1


@pytest.mark.parametrize(("told", "by"), [((21, 900), "upstream"), ((21, -3), "gateway"), ((0, 0), "gateway")])
async def test_a_count_that_differs_is_noted_and_one_that_cannot_be_is_not_billed(front, far, told, by):
    far.always = says("one", usage={"prompt_tokens": told[0], "completion_tokens": told[1], "total_tokens": 0})
    await front.post("/v1/chat/completions", ASKED)
    (row,) = await front.settled(1)
    assert row["counted_by"] == by
    assert row["num_completion_tokens"] == (told[1] if by == "upstream" else 1)
    assert front.gw.upstreams.view("far-1").num_disagreements == 1


async def test_several_answers_to_one_question(front, far):
    whole = await front.client.chat.completions.create(**ASKED, n=3)
    assert [choice.message.content for choice in whole.choices] == ["one two three"] * 3
    told = await events(front, "/v1/chat/completions", {**ASKED, "n": 2})
    texts = ["", ""]
    for each in told:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["one two three"] * 2


async def test_more_than_it_may_be_sent_waits_in_line(open_front, far):
    gap = asyncio.Event()
    far.always = says("one ", "two", gap=gap)
    async with open_front(upstreams=(far.upstream(max_concurrent=1),)) as front:
        calls = [asyncio.create_task(events(front, "/v1/chat/completions", ASKED)) for _ in range(3)]
        await until(lambda: far.came.is_set() and front.gw.upstreams.of("far").num_waiting == 2)
        assert len(far.heard) == 1
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with front.http.get(f"{front.url}/admin/v1/queues?model=far", headers=headers) as answer:
            ((gateway),) = (await answer.json())["data"]
        standard = next(queue for queue in gateway["queues"] if queue["sla_class"] == "standard")
        assert (standard["served_by"], standard["num_waiting"], standard["num_sent"]) == ("upstreams", 2, 1)
        live = front.gw.live.own()
        assert list(live.num_open.values()) == [3]
        assert [(each.upstream, each.state == "waiting") for each in live.streams] == [
            ("far-1", False),
            (None, True),
            (None, True),
        ]
        gap.set()
        await asyncio.gather(*calls)
        assert far.num_connections == 1
        await front.settled(3)


async def test_limits_hold_as_for_any_model(open_front, far):
    policy = msgspec.convert({"limits": {"concurrent_requests": 1}}, Policy)
    far.always = stalls("one ")
    async with (
        open_front(upstreams=(far.upstream(),), policies={"default": policy}) as front,
        front.http.post(f"{front.url}/v1/chat/completions", json={**ASKED, "stream": True}) as answer,
    ):
        await answer.content.readline()
        status, refused, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_tokens_of_a_conversation_are_estimated(front):
    status, body, _ = await front.post("/v1/messages/count_tokens", ASKED)
    assert status == 200
    assert 5 < body["input_tokens"] < 40


async def test_an_upstream_relieves_a_model_whose_workers_are_gone(open_front, far):
    async with open_front(upstreams=(far.upstream(model="demo", overflow=True),)) as front:
        call = front.chat()
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop")
        assert (await call).choices[0].message.content == "Hi"
        assert not far.heard
        front.peer.hang_up()
        await front.lost()
        assert (await front.chat()).choices[0].message.content == "one two three"
        assert far.bodies[0]["model"] == "demo"
        rows = await front.settled(2)
        assert [row["upstream"] for row in rows] == [None, "far-1"]
        assert [model.id async for model in await front.client.models.list()] == ["demo"]


def test_settings_name_what_cannot_be():
    from policies.configuration import SettingsError, load

    entry = '[[upstreams]]\nname = "a"\nmodel = "m"\nurl = "http://host/v1"\n'
    assert load(entry, {}).upstreams[0].model == "m"
    assert not load(entry, {}).models
    for text, named in (
        (entry + entry, "upstreams[1].name"),
        (entry.replace("http://host/v1", "host"), "upstreams[0].url"),
        (entry.replace("http://host", "http://me:secret@host"), "upstreams[0].url"),
        (entry + "overflow = true\n", "upstreams[0].overflow"),
        (entry + "wieght = 2.0\n", "upstreams[0].weight"),
        (entry + '[models.m]\nsource = "demo"\n', "upstreams[0].model"),
    ):
        with pytest.raises(SettingsError, match=named.replace("[", r"\[").replace("]", r"\]")):
            load(text, {})
    assert isinstance(settings.Settings().upstreams, tuple)


async def test_an_upstream_relieves_a_model_that_would_miss_what_its_class_promises(open_front, far):
    weights = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # a second for each token of a prompt, and 5 s are promised
    async with open_front(upstreams=(far.upstream(model="demo", overflow=True),)) as front:
        (worker,) = front.gw.dispatch.workers()
        stats = wire.Stats(0, 0, 64, 0, 0, 64, 0, 0, 0, 0, 0, 0.0, cost_weights=weights)
        front.peer.send(stats)
        await until(lambda: worker.stats is not None and worker.stats.cost_weights == weights)
        assert (await front.chat()).choices[0].message.content == "one two three"
        far.always = fails(500)
        assert front.peer.is_quiet()
        (row,) = await front.settled(1)
        assert row["upstream"] == "far-1"


async def test_operators_see_how_it_does(front, far):
    far.scripts = [fails(500), says("one", usage=None)]
    for _ in range(2):
        await front.post("/v1/chat/completions", ASKED)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with front.http.get(f"{front.url}/metrics", headers=headers) as answer:
        lines = (await answer.text()).splitlines()
    assert answer.status == 200, lines[:5]
    told = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if 'upstream="far-1"' in line}
    assert told["penstock_upstream_requests_total"] == 2
    assert told["penstock_upstream_failures_total"] == told["penstock_upstream_without_usage_total"] == 1
    assert (told["penstock_upstream_up"], told["penstock_upstream_requests"]) == (1, 0)
