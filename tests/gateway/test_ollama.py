"""Ollama's own endpoints: its own client is answered as it expects, and programs on this machine may need no key."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import ollama
import pytest

from gateway.ollama import parse_chat, parse_generate
from gateway.openai import ChatRequest, CompletionRequest
from policies import wire
from policies.settings import Server
from tests.gateway.conftest import HELLO, KEY, Front

END = 3


@pytest.fixture
async def client(front: Front) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(front.url, headers={"authorization": f"Bearer {KEY}"}) as opened:
        yield opened


async def read(client: ollama.AsyncClient, **asked: Any) -> list[ollama.ChatResponse]:
    """All lines of a streamed chat."""
    return [line async for line in await client.chat("demo", HELLO, stream=True, **asked)]


async def test_a_chat_is_answered_in_lines_unless_it_wants_one_body(front: Front, client):
    options = {"num_predict": 20, "temperature": 0.5, "top_k": 3, "seed": 7, "repeat_penalty": 1.1, "num_ctx": 4096}
    task = asyncio.create_task(client.chat("demo:latest", HELLO, options=options, keep_alive="5m"))
    submit = await front.peer.submitted()
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (20, 0.5, 3, 7)
    assert sampling.repetition_penalty == 1.1
    front.peer.say(submit, [*front.ids("Good day."), END], "stop", prefill_s=0.25, decode_s=0.5)
    answer = await task
    assert (answer.model, answer.done, answer.done_reason) == ("demo", True, "stop")
    assert (answer.message.role, answer.message.content) == ("assistant", "Good day.")
    assert answer.prompt_eval_count == len(submit.prompt_token_ids)
    assert answer.eval_count == len(front.ids("Good day.")) + 1
    assert (answer.prompt_eval_duration, answer.eval_duration) == (250_000_000, 500_000_000)
    assert answer.total_duration > 0
    (row,) = await front.settled(1)
    assert (row["endpoint"], row["model"], row["num_completion_tokens"]) == ("/api/chat", "demo", answer.eval_count)


async def test_a_stream_is_lines_of_json_and_the_last_one_counts(front: Front, client):
    reading = asyncio.create_task(read(client))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("one"))
    front.peer.say(submit, [*front.ids(" two"), END], "stop")
    lines = await reading
    assert "".join(line.message.content for line in lines) == "one two"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == len(front.ids("one")) + len(front.ids(" two")) + 1
    assert lines[0].eval_count is None


async def test_without_a_word_about_streams_there_is_one(front: Front):
    call = {"model": "demo", "messages": HELLO}
    asking = asyncio.create_task(front.http.post(f"{front.url}/api/chat", data=msgspec.json.encode(call)))
    front.peer.say(await front.peer.submitted(), [*front.ids("hi"), END], "stop")
    answer = await asking
    assert answer.headers["content-type"] == "application/x-ndjson", "whatever the body said that it is"
    lines = [msgspec.json.decode(line) for line in (await answer.text()).splitlines()]
    assert [line["done"] for line in lines] == [False, True]


async def test_a_prompt_is_a_users_message_unless_it_is_raw(front: Front, client):
    for raw in (False, True):
        task = asyncio.create_task(client.generate("demo", "Hello", system="" if raw else "Be brief.", raw=raw))
        submit = await front.peer.submitted()
        prompt = front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
        assert ("<|im_start|>" in prompt) is not raw
        assert ("Be brief." in prompt) is not raw
        assert submit.sampling.max_tokens == 4096 - len(submit.prompt_token_ids)
        front.peer.say(submit, [*front.ids("Good day."), END], "stop")
        answer = await task
        assert (answer.response.strip(), answer.done_reason) == ("Good day.", "stop")


async def test_what_a_token_was_likely_to_be_is_told_beside_its_text(front: Front, client):
    tokens = front.ids("Good day.")

    def scored(told: list[int]) -> list[wire.TokenLogprob]:
        return [wire.TokenLogprob(-0.5, [token, 300], [-0.5, float("-inf")]) for token in told]

    async def said(asking: asyncio.Task[Any], *, pieces: int) -> Any:
        submit = await front.peer.submitted()
        assert submit.sampling.num_logprobs == 2
        if pieces == 2:
            front.peer.say(submit, tokens[:1], logprobs=scored(tokens[:1]))
        rest = [*tokens[pieces - 1 :], END]
        front.peer.say(submit, rest, "stop", logprobs=scored(rest))
        return await asking

    asked = {"logprobs": True, "top_logprobs": 2}
    whole = await said(asyncio.create_task(client.chat("demo", HELLO, **asked)), pieces=1)
    raw = await said(asyncio.create_task(client.generate("demo", "Hi", raw=True, **asked)), pieces=1)
    lines = await said(asyncio.create_task(read(client, **asked)), pieces=2)
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    told = [entry for line in lines for entry in line.logprobs or ()]
    assert told == list(whole.logprobs) == list(raw.logprobs)
    assert "".join(entry.token for entry in told) == whole.message.content == "Good day."
    assert [entry.logprob for entry in told] == [-0.5] * len(tokens)
    assert [top.logprob for top in told[0].top_logprobs] == [-0.5, -9999.0]


async def test_a_request_without_a_question_loads_the_model_or_is_told_that_it_is_unloaded(front: Front, client):
    assert (await client.generate("demo")).done_reason == "load"
    assert (await client.chat("demo", [])).done_reason == "load"
    for keep_alive in (0, "0", "0s", "0m0s", "999ms", ".5s", 0.9):
        assert (await client.generate("demo", keep_alive=keep_alive)).done_reason == "unload", keep_alive
        assert (await client.chat("demo", [], keep_alive=keep_alive)).done_reason == "unload", keep_alive
    for keep_alive in (-1, 1, "1s", "5m", "0.5m", "-1m", "1h0m", "0x", "", "soon", "1000ms"):
        assert (await client.generate("demo", keep_alive=keep_alive)).done_reason == "load", keep_alive
    assert front.peer.is_quiet()


@pytest.mark.parametrize("keep_alive", ["1" * 1200, "1.1" * 400, "1s" * 600 + "x", "." * 1200])
def test_a_keep_alive_that_is_no_duration_is_read_in_no_time_however_long_it_is(keep_alive):
    body, began_at = msgspec.json.encode({"model": "demo", "keep_alive": keep_alive}), time.process_time()
    assert parse_chat(body).done_reason == "load"
    assert time.process_time() - began_at < 1.0


async def test_models_are_listed_and_described(front: Front, client):
    assert [model.model for model in (await client.list()).models] == ["demo"]
    (running,) = (await client.ps()).models
    assert (running.name, running.context_length) == ("demo", 4096)
    shown = await client.show("demo:latest")
    assert "message['role']" in shown.template
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["penstock.context_length"] == 4096
    async with front.http.get(f"{front.url}/api/version") as answer:
        assert re.fullmatch(r"\d+\.\d+\.\d+", (await answer.json())["version"])
    async with front.http.head(front.url + "/") as answer:
        assert answer.status == 200


def test_a_conversation_with_tools_becomes_a_chat():
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {
        "model": "demo",
        "tools": [weather],
        "options": {"stop": ["a", "b", "c", "d", "e"]},
        "messages": [
            {"role": "user", "content": "And Arden?"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "I must look.",
                "tool_calls": [
                    {"function": {"name": "weather", "arguments": {"city": "Arden"}}},
                    {"function": {"name": "weather", "arguments": {"city": "Bern"}}},
                ],
            },
            {"role": "tool", "tool_name": "weather", "content": "Rain."},
            {"role": "tool", "tool_name": "weather", "content": "Sun."},
        ],
    }
    call = parse_chat(msgspec.json.encode(body))
    assert isinstance(call, ChatRequest)
    assert (call.stream, len(call.stops)) == (True, 5)
    answered, rain, sun = call.messages[1:]
    assert answered.reasoning_content == "I must look."
    assert answered.tool_calls is not None
    assert [one.id for one in answered.tool_calls] == [rain.tool_call_id, sun.tool_call_id] == ["call_0", "call_1"]


def test_a_raw_prompt_is_a_completion():
    call = parse_generate(b'{"model": "demo", "prompt": "x", "raw": true, "options": {"num_predict": -1}}')
    assert isinstance(call, CompletionRequest)
    assert call.max_tokens == 2**31 - 1


REFUSED = [
    ("/api/chat", b"{", 400, "JSON"),
    ("/api/chat", b"[]", 400, "object"),
    ("/api/chat", b'{"x": ' + b"[" * 10_000, 400, "nested"),
    ("/api/chat", {"messages": HELLO}, 400, "model"),
    ("/api/chat", {"model": "another", "messages": HELLO}, 404, "does not exist"),
    ("/api/chat", {"model": "another", "messages": []}, 404, "does not exist"),
    ("/api/chat", {"model": "demo", "messages": [{"role": "critic", "content": "x"}]}, 400, "role"),
    ("/api/chat", {"model": "demo", "messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, r"images"),
    ("/api/chat", {"model": "demo", "messages": HELLO, "options": {"temperature": "hot"}}, 400, "temperature"),
    ("/api/chat", {"model": "demo", "messages": HELLO, "options": {"top_p": 2}}, 400, "top_p"),
    ("/api/chat", {"model": "demo", "messages": HELLO, "format": "xml"}, 400, "format"),
    ("/api/chat", {"model": "demo", "messages": HELLO, "top_logprobs": 2}, 400, "needs 'logprobs'"),
    ("/api/chat", {"model": "demo", "messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("/api/generate", {"model": "demo", "prompt": "x", "context": [1]}, 400, "context"),
    ("/api/generate", {"model": "demo", "prompt": "x", "template": "x"}, 400, "template"),
    ("/api/generate", {"model": "demo", "prompt": "x", "width": 512}, 400, "width"),
    ("/api/generate", {"model": "demo", "prompt": "x", "raw": True, "format": "json"}, 400, "format"),
    ("/api/generate", {"model": "demo", "prompt": 5}, 400, "prompt"),
    ("/api/show", {"model": "another"}, 404, "does not exist"),
    ("/api/pull", {"model": "another"}, 501, "penstock pull"),
    ("/api/nothing", {}, 404, "Invalid URL"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED)
async def test_what_is_wrong_is_said_in_ollamas_shape(front: Front, path, body, status, says):
    answered, answer, _ = await front.post(path, body)
    assert (answered, set(answer)) == (status, {"error"})
    assert re.search(says, answer["error"]), answer
    assert front.peer.is_quiet()


async def test_a_stream_that_fails_ends_with_its_error(front: Front, client):
    reading = asyncio.create_task(read(client))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("one"))
    front.peer.send(wire.Failed(submit.request_id, "internal", "it broke"))
    with pytest.raises(ollama.ResponseError, match="failed while answering"):
        await reading


async def test_a_stream_that_waits_is_sent_lines_without_a_word_and_no_comment(open_front, monkeypatch):
    monkeypatch.setattr("gateway.reply.HEADERS_AFTER_S", 0.0)
    async with open_front(server=Server(heartbeat_s=0.01)) as front:
        call = {"model": "demo", "messages": HELLO}
        asking = asyncio.create_task(front.http.post(f"{front.url}/api/chat", json=call))
        submit = await front.peer.submitted()
        answer = await asking
        for _ in range(2):
            line = ollama.ChatResponse.model_validate_json(await answer.content.readline())
            assert (line.model, line.message.content, line.done) == ("demo", "", False)
        front.peer.say(submit, [END], "stop")
        assert msgspec.json.decode((await answer.read()).splitlines()[-1])["done"]


async def test_a_program_on_this_machine_needs_no_key_where_one_is_set_for_it(open_front):
    environ = {"PENSTOCK_OLLAMA_KEY": KEY}
    async with open_front(environ=environ) as front, aiohttp.ClientSession() as stranger:

        async def status_of(path: str, **headers: str) -> int:
            async with stranger.get(front.url + path, headers=headers) as answer:
                return answer.status

        assert await status_of("/api/tags") == 200
        assert await status_of("/v1/models") == 401, "elsewhere a key is a key"
        page = "a page in a browser may be anybody's"
        assert await status_of("/api/tags", origin="https://evil.example") == 401, page
        assert await status_of("/api/tags", **{"x-forwarded-for": "192.0.2.1"}) == 401, "a proxy speaks for somebody"
        assert await status_of("/api/tags", authorization="Bearer wrong") == 401


async def test_without_that_a_key_is_needed(front: Front):
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{front.url}/api/tags") as answer:
        assert (answer.status, set(await answer.json())) == (401, {"error"})


def as_json(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "demo", "messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("think", "switches"),
    [
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("max", {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"}),
        (None, {}),
    ],
)
def test_whether_to_think_is_told_to_the_template(think, switches):
    call = parse_chat(as_json(think=think))
    assert isinstance(call, ChatRequest)
    assert call.template_switches == switches


@pytest.mark.parametrize("predicted", [-1, -2])
def test_below_zero_is_as_many_as_fit(predicted):
    call = parse_chat(as_json(options={"num_predict": predicted}))
    assert isinstance(call, ChatRequest)
    assert call.asked_tokens is None


async def test_texts_become_vectors(house):
    async with ollama.AsyncClient(house.url, headers={"authorization": f"Bearer {house.key}"}) as client:
        both = await client.embed("demo", ["one river", "two rivers"], dimensions=8)
        assert [len(vector) for vector in both.embeddings] == [8, 8]
        assert both.prompt_eval_count > 2
        older = await client.embeddings("demo", "one river")
        newer = await client.embed("demo", "one river")
        assert list(older.embedding) == pytest.approx(list(newer.embeddings[0]), abs=1e-5)
        with pytest.raises(ollama.ResponseError, match="empty") as refused:
            await client.embed("demo", "")
        assert refused.value.status_code == 400


async def test_a_conversation_has_its_answer_from_a_model(house):
    async with ollama.AsyncClient(house.url, headers={"authorization": f"Bearer {house.key}"}) as client:
        whole = await client.chat("demo", HELLO, options={"temperature": 0, "num_predict": 12})
        pieces = [
            piece.message.content
            async for piece in await client.chat(
                "demo", HELLO, stream=True, options={"temperature": 0, "num_predict": 12}
            )
        ]
        assert "".join(pieces) == whole.message.content != ""
        assert whole.eval_duration > 0
