"""Whatever a client sends, it hears OpenAI's error object with the right status, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import openai
from policies import settings as penstock
from tests.gateway.conftest import ADMIN_KEY, HELLO, KEY, Front
from tests.gateway.peer import Peer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def assert_error(body: Any, param: str | None, code: str | None) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)


def chat(**others: object) -> dict[str, object]:
    return {"model": "demo", "messages": HELLO, **others}


def text(**others: object) -> dict[str, object]:
    return {"model": "demo", "prompt": "Hello", **others}


def said(content: object, **others: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": content} | others])


MISSING = "missing_required_parameter"
ALLOWED = "tool_choice.allowed_tools.tools"
FUNCTION = {"type": "function", "function": {"name": "f"}}
LIST = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def allowed(tools: list[dict[str, object]]) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


REFUSED = [
    (CHAT, b"", None, "invalid_json"),
    (CHAT, b"{", None, "invalid_json"),
    (CHAT, b"\xff\xfe", None, "invalid_json"),
    (CHAT, b'{"model": "\xff"}', None, "invalid_json"),
    (CHAT, b'{"model": "other", "model": "demo", "messages": [{"role": "user"}]}', "model", "duplicate_key"),
    (CHAT, b'{"model": "demo", "messages": [{"role": "user", "role": "user"}]}', "messages[0].role", "duplicate_key"),
    (CHAT, b'{"model": "\\ud800"}', None, "invalid_json"),
    (CHAT, b'{"temperature": NaN}', None, "invalid_json"),
    (CHAT, b'{"temperature": Infinity}', None, "invalid_json"),
    (CHAT, b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None, "invalid_json"),
    (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]} {}', None, "invalid_json"),
    (CHAT, b"[]", None, "invalid_type"),
    (CHAT, b'"text"', None, "invalid_type"),
    (CHAT, b"null", None, "invalid_type"),
    (CHAT, {"messages": HELLO}, "model", "missing_required_parameter"),
    (CHAT, {"model": "demo"}, "messages", "missing_required_parameter"),
    (CHAT, chat(model=5), "model", "invalid_type"),
    (CHAT, chat(messages=[]), "messages", "empty_array"),
    (CHAT, chat(messages="Hello"), "messages", "invalid_type"),
    (CHAT, chat(messages=[5]), "messages[0]", "invalid_type"),
    (CHAT, chat(messages=[*HELLO, {"content": "x"}]), "messages[1].role", "missing_required_parameter"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role", "invalid_value"),
    (CHAT, said(5), "messages[0].content", "invalid_type"),
    (CHAT, said(None), "messages[0].content", None),
    (CHAT, chat(messages=[{"role": "assistant"}]), "messages[0].content", None),
    (
        CHAT,
        said([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    (CHAT, said([{"type": "text"}]), "messages[0].content[0].text", "missing_required_parameter"),
    (CHAT, said([{"text": "x"}]), "messages[0].content[0].type", "missing_required_parameter"),
    (CHAT, chat(temperature=2.1), "temperature", "decimal_above_max_value"),
    (CHAT, chat(temperature=-0.1), "temperature", "decimal_below_min_value"),
    (CHAT, chat(temperature="hot"), "temperature", "invalid_type"),
    (CHAT, chat(temperature=True), "temperature", "invalid_type"),
    (CHAT, b'{"model": "demo", "temperature": 1e999}', "temperature", "decimal_above_max_value"),
    (CHAT, chat(top_p=1.5), "top_p", "decimal_above_max_value"),
    (CHAT, chat(n=0), "n", "integer_below_min_value"),
    (CHAT, chat(n=129), "n", "integer_above_max_value"),
    (CHAT, chat(n=1.5), "n", "invalid_type"),
    (CHAT, chat(max_tokens=0), "max_tokens", "integer_below_min_value"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", "integer_below_min_value"),
    (CHAT, chat(presence_penalty=3), "presence_penalty", "decimal_above_max_value"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty", "decimal_below_min_value"),
    (CHAT, chat(seed=2**63), "seed", "integer_above_max_value"),
    (CHAT, chat(seed=10**400), "seed", "integer_above_max_value"),
    (CHAT, chat(stop=["a"] * 65), "stop", "array_above_max_length"),
    (CHAT, chat(stop=[""]), "stop[0]", "empty_string"),
    (CHAT, chat(stop="x" * 1025), "stop", "string_above_max_length"),
    (CHAT, chat(stop=["a", 5]), "stop[1]", "invalid_type"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias", None),
    (CHAT, chat(logit_bias={"600": 1}), "logit_bias", None),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias", "decimal_above_max_value"),
    (CHAT, chat(logit_bias=[1]), "logit_bias", "invalid_type"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "object_above_max_properties"),
    (CHAT, chat(logprobs=5), "logprobs", "invalid_type"),
    (CHAT, chat(top_logprobs=5), "top_logprobs", None),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "integer_above_max_value"),
    (CHAT, chat(stream="yes"), "stream", "invalid_type"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", None),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "invalid_type"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "invalid_value"),
    (CHAT, chat(response_format={"type": "json_object", "schema": 5}), "response_format.schema", "invalid_type"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities", "unsupported_parameter"),
    (CHAT, chat(functions=[{"name": ""}]), "functions[0].name", "invalid_value"),
    (CHAT, chat(functions=[{"name": "f"}], function_call={"name": "g"}), "function_call", None),
    (CHAT, chat(functions=[{"name": "f"}], tools=[FUNCTION]), "functions", None),
    (CHAT, chat(tools=[{"a": 1}]), "tools[0].type", "missing_required_parameter"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
    (CHAT, chat(tools=[{"type": "mcp", "server_label": "f"}]), "tools[0].type", "unsupported_value"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "invalid_value"),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "x" * 129}}]),
        "tools[0].function.name",
        "invalid_value",
    ),
    (CHAT, chat(tools=[FUNCTION, FUNCTION]), "tools[1].function.name", None),
    (CHAT, chat(tools=[LIST]), "tools[0].function.parameters", None),
    (CHAT, chat(tools=[FUNCTION], tool_choice="always"), "tool_choice", None),
    (CHAT, chat(tools=[FUNCTION], tool_choice=3), "tool_choice", None),
    (CHAT, chat(tool_choice="required"), "tool_choice", None),
    (CHAT, chat(tools=[FUNCTION], tool_choice={"type": "tool"}), "tool_choice.type", "unsupported_value"),
    (CHAT, chat(tools=[FUNCTION], tool_choice={"type": "function"}), "tool_choice.function", MISSING),
    (CHAT, chat(tools=[FUNCTION], tool_choice=named("g")), "tool_choice.function.name", None),
    (CHAT, chat(tools=[FUNCTION], tool_choice=allowed([])), "tool_choice.allowed_tools.tools", "empty_array"),
    (CHAT, chat(tools=[FUNCTION], tool_choice=allowed([named("g")])), ALLOWED + "[0].function.name", None),
    (CHAT, chat(tools=[FUNCTION], tool_choice=allowed([{"type": "mcp"}])), ALLOWED + "[0]", "unsupported_value"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", MISSING),
    (CHAT, chat(messages=[{"role": "function", "content": "x"}]), "messages[0].name", MISSING),
    (CHAT, said([{"type": "refusal", "refusal": "No."}]), "messages[0].content[0].type", "unsupported_value"),
    (CHAT, said([{"type": "image_url"}]), "messages[0].content[0].type", "unsupported_value"),
    (CHAT, chat(reasoning_effort="some"), "reasoning_effort", "invalid_value"),
    (CHAT, chat(prediction={"type": "content"}), "prediction.content", MISSING),
    (CHAT, chat(web_search_options={}), "web_search_options", "unsupported_parameter"),
    (CHAT, chat(moderation={"model": "m"}), "moderation", "unsupported_parameter"),
    (CHAT, chat(chat_template="{{ messages }}"), "chat_template", "unsupported_parameter"),
    (CHAT, chat(continue_final_message=True), "continue_final_message", "unsupported_parameter"),
    (CHAT, chat(service_tier="gold"), "service_tier", "invalid_value"),
    (CHAT, chat(user=5), "user", "invalid_type"),
    (CHAT, chat(user="x" * 513), "user", "string_above_max_length"),
    (CHAT, chat(safety_identifier="x" * 129), "safety_identifier", "string_above_max_length"),
    (CHAT, chat(metadata={"a": 1}), "metadata", "invalid_type"),
    (CHAT, chat(metadata={"a" * 65: "b"}), "metadata", "string_above_max_length"),
    (CHAT, chat(metadata={"a": "b" * 513}), "metadata", "string_above_max_length"),
    (CHAT, chat(metadata={str(i): "" for i in range(17)}), "metadata", "object_above_max_properties"),
    (CHAT, chat(metadata=["a"]), "metadata", "invalid_type"),
    (TEXT, text(metadata={"a": None}), "metadata", "invalid_type"),
    (CHAT, b'{"model": "demo", "user": "\\ud800", "messages": []}', None, "invalid_json"),
    (CHAT, chat(top_k=-2), "top_k", "integer_below_min_value"),
    (CHAT, chat(min_p=1.1), "min_p", "decimal_above_max_value"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", "decimal_below_min_value"),
    (CHAT, chat(min_tokens=5, max_tokens=4), "min_tokens", None),
    (CHAT, chat(stop_token_ids=[600]), "stop_token_ids", None),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]", "integer_below_min_value"),
    (TEXT, text(prompt=""), "prompt", "empty_string"),
    (TEXT, text(prompt=[]), "prompt", "empty_array"),
    (TEXT, text(prompt=[[]]), "prompt", "empty_array"),
    (TEXT, text(prompt=["a", 5]), "prompt", None),
    (TEXT, text(prompt=[5, [6]]), "prompt", None),
    (TEXT, text(prompt=[5, -6]), "prompt[1]", "integer_below_min_value"),
    (TEXT, text(prompt=[600]), "prompt", None),
    (TEXT, text(prompt={"a": 1}), "prompt", "invalid_type"),
    (TEXT, text(prompt=["a"] * 9, n=128), "n", None),
    (TEXT, text(logprobs=21), "logprobs", "integer_above_max_value"),
    (TEXT, text(logprobs=True), "logprobs", "invalid_type"),
    (TEXT, text(suffix="!"), "suffix", "unsupported_parameter"),
    (TEXT, text(suffix="!", echo=True), "echo", "unsupported_parameter"),
    (TEXT, text(messages=[{"role": "user", "content": "Hello"}]), "messages", "unsupported_parameter"),
    (TEXT, {"model": "demo", "messages": []}, "messages", "unsupported_parameter"),
    (TEXT, text(best_of=2, n=3), "best_of", None),
    (TEXT, text(best_of=2, stream=True), "best_of", None),
    (TEXT, text(best_of=129), "best_of", "integer_above_max_value"),
]


async def test_what_is_wrong_is_named(front: Front):
    for path, body, param, code in REFUSED:
        status, answer, _ = await front.post(path, body)
        assert status == 400, (body, answer)
        assert_error(answer, param, code)
        assert answer["error"]["type"] == "invalid_request_error"
    assert front.peer.is_quiet()
    assert front.rows() == []


async def test_unknown_fields_and_nulls_are_tolerated(front: Front):
    fields = ["stop", "n", "temperature", "logit_bias", "tools", "response_format", "stream", "seed", "user"]
    for body in (
        chat(metadata={"a": "b"}, store=True, reasoning_effort="low", tool_choice="auto", something=[1, {"x": None}]),
        chat(**dict.fromkeys(fields)),
        chat(response_format={"type": "text"}, modalities=["text"], user="me"),
        chat(
            messages=[
                *HELLO,
                {"role": "assistant", "content": "\0"},
                {"role": "tool", "tool_call_id": "a", "content": "\0"},
            ]
        ),
    ):
        call = asyncio.create_task(front.post(CHAT, body))
        front.peer.say(await front.peer.submitted(), [3], "stop")
        status, answer, _ = await call
        assert status == 200, answer
        assert answer["service_tier"] == "default"


async def test_a_model_that_is_not_served(front: Front):
    for path, body in ((CHAT, chat(model="gpt-5")), (TEXT, text(model="a/b"))):
        status, answer, _ = await front.post(path, body)
        assert status == 404
        assert_error(answer, "model", "model_not_found")


async def test_a_refusal_does_not_send_the_request_back(front: Front):
    for body in (chat(model="x" * 100_000), chat(service_tier="x" * 100_000), said("x", role="x" * 100_000)):
        status, answer, _ = await front.post(CHAT, body)
        assert status in (400, 404)
        assert len(answer["error"]["message"]) < 1100


async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(open_front):
    async with open_front(peer=Peer(max_model_tokens=20)) as front:
        for path, body, param in ((CHAT, said("stones " * 30), "messages"), (TEXT, text(prompt=[5] * 20), "prompt")):
            status, answer, _ = await front.post(path, body)
            assert status == 400
            assert_error(answer, param, "context_length_exceeded")
            # Clients cut what they ask by these numbers.
            words = rf"maximum context length is (\d+) tokens\. However, your {param} resulted in (\d+) tokens\. Please"
            most, found = re.search(words, answer["error"]["message"]).groups()
            assert int(found) >= int(most) == 20
        call = asyncio.create_task(front.post(TEXT, text(prompt=[5] * 19)))
        submit = await front.peer.submitted()
        assert submit.sampling.max_tokens == 1
        front.peer.say(submit, [9], "length")
        assert (await call)[0] == 200


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"model": "\\ud83d"}', "a lone surrogate"),
        (b'{"model": "\\uD83D" }', "a lone surrogate"),
        (b'{"model": "\\ud83d\\ude', "truncated"),
        (b'{"model": "\\ud83d", "messages": []}', "surrogate pair"),
    ],
)
async def test_why_a_body_is_no_json_is_said(front: Front, body, why):
    status, answer, _ = await front.post(CHAT, body)
    assert status == 400
    assert_error(answer, None, "invalid_json")
    assert why in answer["error"]["message"]


async def test_a_body_over_the_limit(open_front):
    async with open_front(server=penstock.Server(max_body_bytes=10_000)) as front:
        status, answer, _ = await front.post(CHAT, said("x" * 10_000))
        assert status == 413
        assert_error(answer, None, "request_too_large")
        status, answer, _ = await front.post(
            CHAT, gzip.compress(json.dumps(said("x" * 5_000_000)).encode()), **{"content-encoding": "gzip"}
        )
        assert status == 413


async def test_wrong_methods_types_and_addresses(front: Front):
    async def ask(method: str, path: str, **others: Any) -> tuple[int, Any, Any]:
        async with front.http.request(method, front.url + path, **others) as answer:
            return answer.status, await answer.json(), answer.headers

    status, answer, headers = await ask("GET", TEXT)
    assert (status, headers["allow"]) == (405, "POST")
    assert_error(answer, None, "method_not_allowed")
    status, answer, _ = await ask("DELETE", "/v1/models")
    assert status == 405
    status, answer, _ = await ask("POST", CHAT, data=b"{}", headers={"content-type": "text/plain"})
    assert status == 415
    assert_error(answer, None, "unsupported_media_type")
    status, answer, _ = await ask("POST", CHAT, data={"model": "demo"})
    assert status == 415
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/api/tags", "/api/tags"),
    ):
        status, answer, _ = await front.post(path, {})
        assert (status, answer["error"]["message"]) == (404, f"Invalid URL (POST {path}); did you mean {meant}?")
    for path in ("/nothing", "/v1", "/v1/nothing", "/v1/chat/completions/", "/%00", "/v1/models/"):
        status, answer, _ = await ask("GET", path)
        assert status == 404, path
        assert_error(answer, None, "unknown_url")


async def test_no_key_or_a_wrong_one(front: Front):
    for authorization in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {ADMIN_KEY}", f"Bearer {KEY}x"):
        status, answer, _ = await front.post(CHAT, b"not even JSON", authorization=authorization)
        assert status == 401
        assert_error(answer, None, "invalid_api_key")


async def test_a_template_that_refuses_says_why(open_front):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with a user!') }}{% endif %}x"
    async with open_front(model={"template": template}) as front:
        status, answer, _ = await front.post(CHAT, chat(messages=[{"role": "system", "content": "x"}]))
        assert status == 400
        assert_error(answer, "messages", None)
        assert "Begin with a user!" in answer["error"]["message"]


async def test_a_model_without_a_template_has_no_chat(open_front):
    async with open_front(model={"template": None}) as front:
        status, answer, _ = await front.post(CHAT, chat())
        assert status == 400
        assert_error(answer, "model", None)


async def test_a_body_that_is_not_what_its_encoding_says(front: Front):
    status, answer, _ = await front.post(CHAT, b"not gzip", **{"content-encoding": "gzip"})
    assert status == 400
    assert_error(answer, None, None)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
fields = [*openai.ChatRequest.__struct_fields__, *openai.CompletionRequest.__struct_fields__]
near_requests = st.builds(
    lambda base, others: {**base, **others},
    st.sampled_from([chat(), text(), {}]),
    st.dictionaries(st.sampled_from(fields), anything, min_size=1, max_size=3),
)
bodies = st.binary() | st.builds(lambda value: json.dumps(value).encode(), anything | near_requests)


@given(bodies)
@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_is_a_request_or_malformed(body):
    for parse in (openai.parse_chat, openai.parse_completion):
        with contextlib.suppress(openai.Malformed):
            openai.sampling(parse(body), 1, 1000)


@pytest.mark.parametrize("seed", range(3))
async def test_bytes_flipped_in_a_good_body_never_break_the_server(front: Front, seed: int):
    rng = random.Random(seed)
    good = json.dumps(chat(stop=["a"], n=1, logit_bias={"5": 1}, tools=[FUNCTION])).encode()
    for _ in range(60):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        call = asyncio.create_task(front.post(CHAT, bytes(body)))
        submitted = asyncio.create_task(front.peer.submitted())
        await asyncio.wait([call, submitted], return_when=asyncio.FIRST_COMPLETED)
        if submitted.done():
            front.peer.say(submitted.result(), [3], "stop")
        submitted.cancel()
        status, answer, _ = await call
        assert status in (200, 400, 404), answer
        assert status == 200 or set(answer["error"]) == {"message", "type", "param", "code"}
