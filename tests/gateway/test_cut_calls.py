"""Answers that end where a call has begun and nothing of its arguments was said: its markup is nobody's text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers import Said, gathered
from gateway.parsers.reader import MIN_WORD_CHARS, Reader
from tests.gateway.conftest import HELLO, Front
from tests.gateway.test_chat_tools import TEMPLATE, say, tool
from tests.gateway.test_parsers import CALL, FAMILIES, WRITTEN, fragments, pieces_of, reader, without_ids

CUTS = [
    'I look.\n<tool_call>\n{"name": "get_wea',
    'I look.\n<tool_call>\n{"na',
    "I look.\n<tool_call>",
    "I look.\n<tool",
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def read(of: Reader, pieces: list[str], is_cut: bool) -> Said:
    for piece in pieces:
        of.feed(piece)
    of.finish(is_cut)
    return without_ids(gathered(of.take()))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_wherever_a_call_is_cut_none_of_its_markup_is_text(family, special):
    before = "" if family in ("llama", "json") else "I look.\n"
    whole = pieces_of(before + WRITTEN[family], reader(family, special=special))
    num_calls = 0
    for num in range(len(before), len(whole) + 1):
        said = read(reader(family, special=special), whole[:num], True)
        # Of a word's one character nobody knows what it would have become.
        assert (said.content or "").removesuffix("<").removesuffix("[").rstrip() == before.rstrip(), num
        assert len(said.calls) >= num_calls, num
        num_calls = len(said.calls)
    assert num_calls == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_out_of_a_call_all_calls_are_whole(family):
    whole = pieces_of(WRITTEN[family], reader(family))
    has_been_in_one = []
    for num in range(len(whole) + 1):
        of = reader(family)
        said = read(of, whole[:num], True)
        has_been_in_one.append(of.is_in_call)
        if not of.is_in_call:
            assert all(isinstance(json.loads(call.arguments), dict) for call in said.calls), num
    assert any(has_been_in_one)
    assert not has_been_in_one[-1]


@given(st.lists(fragments, max_size=8).map("".join), st.sampled_from(FAMILIES), st.sampled_from([None, "think"]))
def test_a_cut_takes_nothing_but_from_the_end(text, family, thinking):
    pieces = pieces_of(text, reader(family, thinking))
    whole, cut = (read(reader(family, thinking), pieces, is_cut) for is_cut in (False, True))
    assert cut.calls == whole.calls
    assert (whole.content or "").startswith(cut.content or "")
    assert (whole.reasoning or "").startswith(cut.reasoning or "")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Use <tool_call> to call"),
        ("hermes", "if a <"),
        ("hermes", "<tool_call>{'name': 'get_weather"),
        ("json", '{"city": "Par'),
        ("json", '{"city'),
        ("json", '{"name": "Anna", "age": 7'),
        ("json", '{"name": "An'),
        ("json", '{"type": "circle", "radius": 1'),
        ("json", '{"arguments": {"city": "Arden"'),
        ("json", "```python\nprint("),
        ("llama", '{"title": "get_weather"'),
        ("mistral", "[1, 2"),
    ],
)
def test_a_text_that_is_cut_stays_as_it_stands(family, text):
    assert read(reader(family), list(text), True) == Said(text, None, ())


def test_a_cut_word_around_the_reasoning_is_no_text():
    for num in range(MIN_WORD_CHARS, len("<think>")):
        assert read(reader("hermes", "think"), list("<think>"[:num]), True) == Said(None, None, ())
        assert read(reader("hermes", "think"), list("<think>Hm" + "</think>"[:num]), True) == Said(None, "Hm", ())


@pytest.fixture
async def front(open_front):
    async with open_front(model={"template": TEMPLATE}) as opened:
        yield opened


async def streamed(front: Front, path: str, body: Any) -> list[Any]:
    """What the events of a stream, or its lines, say."""
    async with front.http.post(front.url + path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    said = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(one) for one in said]


async def asked(front: Front, path: str, body: Any, text: str, reason: str) -> tuple[Any, list[Any]]:
    """The answer, and a stream of the same."""
    whole = asyncio.create_task(front.post(path, {**body, "stream": False}))
    await say(front, text, reason)
    status, answer, _ = await whole
    assert status == 200, answer
    pieces = asyncio.create_task(streamed(front, path, body))
    await say(front, text, reason, num_tokens=1)
    return answer, await pieces


@pytest.mark.parametrize("text", CUTS)
async def test_in_chats(front: Front, text):
    body = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")]}
    answer, chunks = await asked(front, "/v1/chat/completions", body, text, "length")
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "length")
    assert not choice["message"].get("tool_calls")
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert not any(delta.get("tool_calls") for delta in deltas)


@pytest.mark.parametrize("text", CUTS)
async def test_in_responses(front: Front, text):
    function = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    body = {"model": "demo", "input": "Hello", "tools": [function]}
    answer, events = await asked(front, "/v1/responses", body, text, "length")
    for response in (answer, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [("message", "I look.")]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "I look."


@pytest.mark.parametrize("text", CUTS)
async def test_in_messages(front: Front, text):
    function = {"name": "get_weather", "input_schema": PARAMETERS}
    body = {"model": "demo", "messages": HELLO, "tools": [function], "max_tokens": 50}
    answer, events = await asked(front, "/v1/messages", body, text, "length")
    assert answer["stop_reason"] == "max_tokens"
    assert [(block["type"], block["text"]) for block in answer["content"]] == [("text", "I look.")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "I look."


@pytest.mark.parametrize("text", CUTS)
async def test_in_ollamas_chats(front: Front, text):
    body = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")]}
    answer, lines = await asked(front, "/api/chat", body, text, "length")
    assert (answer["message"]["content"], answer["done_reason"]) == ("I look.", "length")
    assert "".join(line["message"]["content"] for line in lines) == "I look."


async def test_a_stop_string_cuts_as_a_limit_does_and_the_model_s_own_end_does_not(front: Front):
    options = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")]}
    answer, _ = await asked(
        front, "/v1/chat/completions", {**options, "stop": ['"argu']}, f"I look.<tool_call>{CALL}", "stop"
    )
    assert answer["choices"][0]["message"]["content"] == "I look."
    answer, _ = await asked(front, "/v1/chat/completions", options, "Write <tool_call>", "stop")
    assert answer["choices"][0]["message"]["content"] == "Write <tool_call>"


WHOLE = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("stop", "reason"), [('"city"', "stop"), ("}}", "stop"), ("\n</tool_call>", "tool_calls"), ("none", "tool_calls")]
)
async def test_a_call_that_a_stop_string_has_cut_is_none_to_be_acted_on(front: Front, stop, reason):
    body = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")], "stop": [stop]}
    answer, chunks = await asked(front, "/v1/chat/completions", body, WHOLE, "stop")
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == reason
    assert CALL.partition('"arguments": ')[2][:-1].startswith(call["function"]["arguments"])
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == reason
    assert not answer["choices"][0]["message"]["content"]


async def test_older_functions_end_in_the_same_way(front: Front):
    functions = [tool("get_weather")["function"]]
    for stop, reason in (('"city"', "stop"), ("none", "function_call")):
        body = {"model": "demo", "messages": HELLO, "functions": functions, "stop": [stop]}
        answer, chunks = await asked(front, "/v1/chat/completions", body, WHOLE, "stop")
        assert answer["choices"][0]["finish_reason"] == reason
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == reason


@pytest.mark.parametrize(("stop", "reason", "num"), [('"city"', "stop", 0), (None, "length", 0), (None, "stop", 1)])
async def test_a_call_without_whole_arguments_is_none_of_ollamas(front: Front, stop, reason, num):
    """Its clients take them as an object, and look at nothing else."""
    body = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")]}
    body |= {"options": {"stop": [stop]}} if stop else {}
    text = WHOLE if stop or num else WHOLE[: WHOLE.index("Pa")]
    answer, lines = await asked(front, "/api/chat", body, text, reason)
    assert answer["done_reason"] == lines[-1]["done_reason"] == reason
    for said in ([answer], lines):
        calls = [call for line in said for call in line["message"].get("tool_calls", ())]
        assert [call["function"]["arguments"] for call in calls] == [json.loads(CALL)["arguments"]] * num


async def test_an_answer_that_is_nothing_else_has_no_text(front: Front):
    body = {"model": "demo", "messages": HELLO, "tools": [tool("get_weather")]}
    answer, chunks = await asked(front, "/v1/chat/completions", body, '<tool_call>{"na', "length")
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    assert not any(choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])
