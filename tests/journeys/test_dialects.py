"""The same model in other dialects, through their official clients: text, tools, and how likely a text is."""

from __future__ import annotations

import json

import ollama
import pytest

from demo.tools import TOOLS
from tests import official
from tests.builders import PATIENCE_S

WEATHER = TOOLS["get_weather"]
ASKS_FOR_IT = [{"role": "user", "content": "What is the weather in Rome?"}]
QUESTION = [{"role": "user", "content": "What is the weather in Arden?"}]


@pytest.fixture
async def claude(house):
    async with official.Anthropic(base_url=house.url, api_key=house.key, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


async def test_a_message_is_what_a_chat_says(house, claude):
    async with house.client() as client:
        chat = await client.chat.completions.create(
            model="demo", messages=QUESTION, temperature=0, max_completion_tokens=24
        )
    call = {"model": "demo", "max_tokens": 24, "messages": QUESTION, "extra_body": {"temperature": 0}}
    message = await claude.messages.create(**call)
    assert message.content[0].text == chat.choices[0].message.content
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    async with claude.messages.stream(**call) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].text == message.content[0].text
    assert streamed.stop_reason == message.stop_reason
    counted = await claude.messages.count_tokens(model="demo", messages=QUESTION)
    assert counted.input_tokens == chat.usage.prompt_tokens


async def test_a_prompts_log_probabilities_are_those_that_its_tokens_had_as_an_answer(house):
    async with house.client() as client:
        written = await client.completions.create(
            model="demo", prompt="One day a miller", temperature=0, max_tokens=12, logprobs=0
        )
        text = "One day a miller" + written.choices[0].text
        echoed = await client.completions.create(model="demo", prompt=text, echo=True, logprobs=0, max_tokens=0)
    (choice,) = echoed.choices
    assert choice.text == text
    by_offset = dict(zip(choice.logprobs.text_offset, choice.logprobs.token_logprobs, strict=True))
    own = written.choices[0].logprobs
    start = len("One day a miller")
    for offset, logprob, token in zip(own.text_offset, own.token_logprobs, own.tokens, strict=True):
        if start + offset in by_offset and token.strip():
            assert by_offset[start + offset] == pytest.approx(logprob, abs=0.05)
    assert choice.logprobs.token_logprobs[0] is None


async def test_a_tool_is_called_and_its_result_is_read_in_anthropics_blocks(house, claude):
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    call = {"model": "demo", "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}}
    message = await claude.messages.create(messages=ASKS_FOR_IT, **call)
    assert message.stop_reason == "tool_use"
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Rome"})
    assert use.id.startswith("toolu_")
    async with claude.messages.stream(messages=ASKS_FOR_IT, **call) as stream:
        streamed = await stream.get_final_message()
    assert [(block.name, block.input) for block in streamed.content if block.type == "tool_use"] == [
        (use.name, use.input)
    ]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"weather": "sunny"}'}
    answered = await claude.messages.create(
        messages=[
            *ASKS_FOR_IT,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
        **call,
    )
    assert answered.stop_reason == "end_turn"
    assert answered.content[0].text
    forced = await claude.messages.create(
        messages=QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **call
    )
    assert [block.name for block in forced.content if block.type == "tool_use"] == ["get_weather"]


async def test_a_tool_is_called_in_ollamas_shape(house):
    async with ollama.AsyncClient(house.url, headers={"authorization": f"Bearer {house.key}"}) as client:
        call = {"model": "demo", "messages": ASKS_FOR_IT, "tools": [WEATHER], "options": {"temperature": 0}}
        whole = await client.chat(**call)
        streamed = [line async for line in await client.chat(stream=True, **call)]
        for calls in (whole.message.tool_calls, [one for line in streamed for one in line.message.tool_calls or []]):
            (one,) = calls
            assert (one.function.name, one.function.arguments) == ("get_weather", {"city": "Rome"})
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        held = await client.chat("demo", ASKS_FOR_IT, format=schema, options={"num_predict": 40})
        assert json.loads(held.message.content)["n"] in (1, 2)
