"""Servers that people run, as upstreams: the same model answers through each of them, in every dialect, and what the
ledger says is what the clients were told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from tests.builders import until
from tests.upstreams.conftest import KINDS, RANKS, VECTORS, RealServer

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
SAYS = "The capital of France is Paris."
FRESH = {"cache-control": "no-store"}
GREEDY = {"temperature": 0, "max_tokens": 40}


async def posted(front, path: str, body: dict) -> dict:
    async with front.http() as session, session.post(path, json=body, headers=FRESH) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return json.loads(text)


async def streamed(front, path: str, body: dict) -> list[dict]:
    async with front.http() as session, session.post(path, json={**body, "stream": True}, headers=FRESH) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line.strip() async for line in answer.content]
    lines = [line.removeprefix(b"data: ") for line in lines if line.startswith((b"data: {", b"{"))]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", [*KINDS, "estimated"])
async def test_every_dialect_is_answered_and_the_ledger_has_what_clients_were_told(front, kind):
    before = {row.request_id for row in await front.ledger_rows(model=kind)}
    told = []  # (prompt, completion) of each answer, as its client heard them
    chat = {"model": kind, "messages": ASKED, **GREEDY}

    whole = await posted(front, "/v1/chat/completions", chat)
    assert whole["choices"][0]["message"]["content"] == SAYS
    assert whole["choices"][0]["finish_reason"] == "stop"
    told.append((whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]))

    chunks = await streamed(front, "/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"]) == SAYS
    usage = chunks[-1]["usage"]
    told.append((usage["prompt_tokens"], usage["completion_tokens"]))

    message = await posted(front, "/v1/messages", chat)
    assert message["content"] == [{"type": "text", "text": SAYS}]
    assert message["stop_reason"] == "end_turn"
    told.append(anthropics(message["usage"]))
    events = await streamed(front, "/v1/messages", chat)
    texts = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(texts) == SAYS
    told.append(anthropics(next(each for each in events if each["type"] == "message_delta")["usage"]))

    asked = {"model": kind, "input": ASKED[0]["content"], "temperature": 0, "max_output_tokens": 40}
    response = await posted(front, "/v1/responses", asked)
    assert response["output"][-1]["content"][0]["text"] == SAYS
    told.append((response["usage"]["input_tokens"], response["usage"]["output_tokens"]))
    last = (await streamed(front, "/v1/responses", asked))[-1]["response"]
    assert last["output"][-1]["content"][0]["text"] == SAYS
    told.append((last["usage"]["input_tokens"], last["usage"]["output_tokens"]))

    asked = {"model": kind, "messages": ASKED, "options": {"temperature": 0, "num_predict": 40}}
    line = await posted(front, "/api/chat", {**asked, "stream": False})
    assert line["message"]["content"] == SAYS
    told.append((line["prompt_eval_count"], line["eval_count"]))
    lines = await streamed(front, "/api/chat", asked)
    assert "".join(each["message"]["content"] for each in lines) == SAYS
    told.append((lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]))

    rows = [row for row in await front.ledger_rows(model=kind) if row.request_id not in before]
    assert sorted((row.num_prompt_tokens, row.num_completion_tokens) for row in rows) == sorted(told)
    assert {(row.upstream, row.status) for row in rows} == {(kind, 200)}
    assert all(prompt > 5 and 5 <= completion <= 12 for prompt, completion in told), told
    view = front.gw.upstreams.view(kind)
    assert (view.state, view.num_open, view.num_failed) == ("closed", 0, 0)
    assert view.num_disagreements == 0 if kind != "estimated" else True
    assert sum(row.counted_by == "gateway" for row in rows) == view.num_without_usage


def anthropics(usage: dict) -> tuple[int, int]:
    """Its prompts are told without what was cached."""
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached, usage["output_tokens"]


@pytest.mark.parametrize("kind", ["xllamacpp", "llama_cpp"])
async def test_texts_are_gone_on_with(front, kind):
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": kind, "prompt": prompt, **GREEDY}
    assert (await posted(front, "/v1/completions", body))["choices"][0]["text"] == SAYS
    chunks = await streamed(front, "/v1/completions", body)
    assert "".join(each["choices"][0]["text"] for each in chunks if each["choices"]) == SAYS


async def test_vectors_come_from_one_of_them(front):
    body = {"model": VECTORS, "input": ["one", "two"]}
    found = await posted(front, "/v1/embeddings", body)
    assert [len(each["embedding"]) for each in found["data"]] == [256, 256]
    assert found["usage"]["prompt_tokens"] > 1


async def test_documents_and_pairs_are_scored_by_one_of_them(front):
    """The demo model has no head for it, so that its scores mean nothing; but they are the server's own."""
    documents = ["one river", "two hats", "a boat on a river"]
    body = {"model": RANKS, "query": "river", "documents": documents}
    ranked = await posted(front, "/v1/rerank", body)
    scores = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert sorted(scores) == [0, 1, 2]
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    best = await posted(front, "/v1/rerank", {**body, "top_n": 1, "return_documents": False})
    assert [each.keys() for each in best["results"]] == [{"index", "relevance_score"}]
    told = await posted(front, "/v1/score", {"model": RANKS, "text_1": "river", "text_2": documents})
    assert [each["score"] for each in told["data"]] == pytest.approx([scores[index] for index in range(3)], abs=1e-4)
    rows = await front.ledger_rows(model=RANKS)
    assert {(row.upstream, row.status) for row in rows} == {(RANKS, 200)}
    assert [row.num_prompt_tokens for row in rows] == [each["usage"]["prompt_tokens"] for each in (ranked, best, told)]


async def test_tools_are_called_in_every_dialect(front):
    model, asked = {"model": "xllamacpp"}, [{"role": "user", "content": "What is the weather in Paris?"}]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather in a place", "parameters": parameters}
    tools, paris = [{"type": "function", "function": function}], {"city": "Paris"}
    chat = {**model, "messages": asked, "tools": tools, **GREEDY}
    for choice in ("auto", "required"):
        (said,) = (await posted(front, "/v1/chat/completions", {**chat, "tool_choice": choice}))["choices"]
        (call,) = said["message"]["tool_calls"]
        assert (said["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
        assert json.loads(call["function"]["arguments"]) == paris

    chunks = await streamed(front, "/v1/chat/completions", chat)
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert json.loads("".join(piece["function"].get("arguments") or "" for piece in pieces)) == paris
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    told = [*asked, said["message"], {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}]
    (then,) = (await posted(front, "/v1/chat/completions", {**chat, "messages": told}))["choices"]
    assert then["message"]["content"]

    body = {**model, "messages": asked, **GREEDY}
    anthropic = [{"name": "get_weather", "input_schema": parameters}]
    message = await posted(front, "/v1/messages", {**body, "tools": anthropic})
    assert message["stop_reason"] == "tool_use"
    assert [each["input"] for each in message["content"] if each["type"] == "tool_use"] == [paris]
    own = {**model, "input": asked, "tools": [{"type": "function", **function}], "temperature": 0}
    calls = [each for each in (await posted(front, "/v1/responses", own))["output"] if each["type"] == "function_call"]
    assert [json.loads(each["arguments"]) for each in calls] == [paris]
    line = await posted(front, "/api/chat", {**body, "tools": tools, "stream": False})
    assert [each["function"]["arguments"] for each in line["message"]["tool_calls"]] == [paris]


async def test_log_probabilities_come_through(front):
    body = {"model": "xllamacpp", "messages": ASKED, **GREEDY, "logprobs": True, "top_logprobs": 2}
    entries = (await posted(front, "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in entries).startswith(SAYS)
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in entries)


async def test_a_refusal_is_named_and_is_nobodys_failure(front):
    body = {
        "model": "xllamacpp",
        "messages": ASKED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}},
    }
    async with front.http() as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert front.gw.upstreams.view("xllamacpp").state == "closed"


@contextlib.asynccontextmanager
async def added(house, server: RealServer, **terms: object) -> AsyncIterator[None]:
    """While this lasts the house has it as an upstream, "mortal", for a model of that name."""
    body = {"name": "mortal", "model": "mortal", "url": f"http://127.0.0.1:{server.port}/v1", "probe_s": 0}
    async with house.http(house.admin_key) as admin:
        async with admin.post("/admin/v1/upstreams", json={**body, **terms}) as made:
            assert made.status == 201, await made.text()
        yield
        async with admin.delete("/admin/v1/upstreams/mortal") as deleted:
            assert deleted.status == 200, await deleted.text()


async def test_one_that_is_killed_ends_its_streams_opens_its_breaker_and_is_asked_again_when_it_is_back(front, mortal):
    asked = {"model": "mortal", "messages": ASKED, "temperature": 0, "ignore_eos": True, "max_tokens": 4000}
    failure, text = None, ""
    async with added(front, mortal, breaker_failures=2, breaker_open_s=2, max_retries=0), front.http() as session:
        async with session.post("/v1/chat/completions", json={**asked, "stream": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    failure = said.get("error")
                    text += "" if failure else said["choices"][0]["delta"].get("content") or ""
                    if len(text) > 20 and mortal.process.poll() is None:
                        mortal.kill()
        assert text.startswith(SAYS[:20])
        assert failure["code"] in ("upstream_failed", "upstream_unreachable")
        (row,) = await front.ledger_rows(model="mortal")
        assert (row.status, row.upstream, row.counted_by) == (502, "mortal", "gateway")
        assert 0 < row.num_completion_tokens < 4000

        async def status() -> int:
            async with session.post("/v1/chat/completions", json={**asked, "max_tokens": 3}) as answer:
                return answer.status

        assert await status() == 502
        assert front.gw.upstreams.view("mortal").state == "open"
        assert await status() == 503
        mortal.start()
        mortal.until_there()
        await until(lambda: front.gw.upstreams.view("mortal").state == "half_open")
        assert await status() == 200
        assert front.gw.upstreams.view("mortal").state == "closed"


async def test_while_one_is_away_a_worker_here_answers_its_chats_and_when_it_is_back_it_does(house, mortal):
    async with added(house, mortal, fallbacks=["demo"], breaker_failures=1, breaker_open_s=0.2):
        chat = {"model": "mortal", "messages": ASKED, **GREEDY}

        async def answered_by() -> tuple[str | None, bool]:
            """The upstream, and whether a worker computed it; whoever does, its client hears the same."""
            before = await house.ledger_rows(model="mortal")
            chunks = await streamed(house, "/v1/chat/completions", chat)
            assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == SAYS
            *others, row = await house.ledger_rows(model="mortal")
            assert (len(others), row.status) == (len(before), 200)
            assert row.num_completion_tokens >= 5
            return row.upstream, row.engine_us > 0

        def breaker() -> str:
            return house.gw.upstreams.view("mortal").state

        assert await answered_by() == ("mortal", False)
        mortal.kill()
        assert [await answered_by() for _ in range(3)] == [(None, True)] * 3
        assert breaker() in ("open", "half_open")
        mortal.start()
        mortal.until_there()
        await until(lambda: breaker() == "half_open")
        assert await answered_by() == ("mortal", False)
        assert breaker() == "closed"
