"""The demo model calls a tool, by itself and because it has to, for OpenAI's own client."""

from __future__ import annotations

import json
import re

import openai
import pytest
from openai.types.responses.response import IncompleteDetails

from tests import official

GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FROBNICATE = {
    "type": "function",
    "function": {
        "name": "frobnicate",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "how": {"enum": ["well", "badly"]}},
            "required": ["n", "how"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

NOTHING_ELSE = {**GET_WEATHER["function"]["parameters"], "additionalProperties": False}


async def asked(client: openai.AsyncOpenAI, house, messages, **others):
    return await client.chat.completions.create(model=house.model, messages=messages, **others)


async def test_the_demo_model_asks_for_the_weather_and_tells_it(house):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    async with house.client() as client:
        (choice,) = (await asked(client, house, messages, tools=[GET_WEATHER], temperature=0)).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        messages.append(choice.message.model_dump(exclude_none=True))
        result = json.dumps({"city": "Paris", "weather": "sunny", "temperature": 21})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        (choice,) = (await asked(client, house, messages, tools=[GET_WEATHER], temperature=0)).choices
    assert choice.finish_reason == "stop"
    assert "sunny" in choice.message.content
    assert "21" in choice.message.content


async def test_a_stream_says_the_same_call(house):
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    async with (
        house.client() as client,
        client.chat.completions.stream(
            model=house.model, messages=messages, tools=[GET_WEATHER], temperature=0
        ) as stream,
    ):
        (choice,) = (await stream.get_final_completion()).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize("max_tokens", [8, 16, 40])
async def test_a_strict_call_that_has_no_room_is_left_out_and_the_answer_says_that_it_was_cut(house, max_tokens):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    strict = {**GET_WEATHER["function"], "strict": True, "parameters": NOTHING_ELSE}
    asks = {"tools": [{"type": "function", "function": strict}], "temperature": 0, "max_tokens": max_tokens}
    has_room = max_tokens == 40
    async with house.client() as client:
        whole = await asked(client, house, messages, **asks, logprobs=True)
        streamed = [
            chunk
            async for chunk in await asked(
                client, house, messages, **asks, stream=True, stream_options={"include_usage": True}
            )
        ]
        response = await client.responses.create(
            model=house.model,
            input=messages,
            tools=[{"type": "function", **strict}],
            temperature=0,
            max_output_tokens=max_tokens,
        )
    tool = {"name": "get_weather", "strict": True, "input_schema": NOTHING_ELSE}
    async with official.Anthropic(base_url=house.url, api_key=house.key, max_retries=0) as client:
        message = await client.messages.create(
            model=house.model, messages=messages, tools=[tool], max_tokens=max_tokens, extra_body={"temperature": 0}
        )
    (choice,) = whole.choices
    assert choice.finish_reason == ("tool_calls" if has_room else "length")
    assert bool(choice.message.tool_calls) == has_room
    deltas = [chunk.choices[0] for chunk in streamed if chunk.choices]
    assert deltas[-1].finish_reason == choice.finish_reason
    assert "".join(each.delta.content or "" for each in deltas) == (choice.message.content or "")
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert response.status == ("completed" if has_room else "incomplete")
    assert response.incomplete_details == (None if has_room else IncompleteDetails(reason="max_output_tokens"))
    assert message.stop_reason == ("tool_use" if has_room else "max_tokens")
    assert whole.usage.completion_tokens == message.usage.output_tokens <= max_tokens
    if not has_room:
        said = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
        assert said.decode() == choice.message.content == message.content[0].text == response.output_text


async def test_a_model_that_has_to_call_calls_as_the_schema_says_whatever_it_was_asked(house):
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    tools = [GET_WEATHER, FROBNICATE]
    async with house.client() as client:
        for seed in range(6):
            named = {"type": "function", "function": {"name": "frobnicate"}}
            answer = await asked(
                client, house, messages, tools=tools, tool_choice=named, seed=seed, temperature=1, max_tokens=60
            )
            (call,) = answer.choices[0].message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "frobnicate"
            assert set(arguments) == {"n", "how"}
            assert isinstance(arguments["n"], int)
            assert arguments["how"] in ("well", "badly")
            free = await asked(client, house, messages, tools=tools, tool_choice="auto", seed=seed, max_tokens=20)
            assert free.choices[0].message.content


async def test_a_custom_tool_gets_text_of_its_grammar_whatever_the_model_was_asked(house):
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    lark = 'start: NUMBER (SIGN NUMBER)* "\\n"\nSIGN: " + " | " \\"-\\" "\nNUMBER: /[0-9]{1,2}/\n'
    is_right = {"lark": r"[0-9]{1,2}(?:(?: \+ | \"-\" )[0-9]{1,2})*\n", "regex": r'say "[a-z]{1,5}"'}
    num_whole = 0
    async with house.client() as client:
        for seed, (syntax, definition) in enumerate((("lark", lark), ("regex", is_right["regex"])) * 3):
            form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
            tools = [GET_WEATHER, {"type": "custom", "custom": {"name": "sum", "format": form}}]
            named = {"type": "custom", "custom": {"name": "sum"}}
            answer = await asked(client, house, messages, tools=tools, tool_choice=named, seed=seed, max_tokens=120)
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert (call.type, call.custom.name) == ("custom", "sum")
            if choice.finish_reason == "tool_calls":
                num_whole += 1
                assert re.fullmatch(is_right[syntax], call.custom.input), call.custom.input
    assert num_whole > 0


async def test_several_answers_share_one_prefill(house):
    """The worker reads the prompt once, and little more than that."""
    question = " ".join(f"Part {number}: the owl flew on." for number in range(60))
    await house.quiet()
    num_before = num_prefill_tokens(house)
    async with house.client() as client:
        answer = await asked(
            client, house, [{"role": "user", "content": question}], n=4, max_tokens=8, tools=[GET_WEATHER]
        )
    assert len(answer.choices) == 4
    num_prompt_tokens = answer.usage.prompt_tokens
    await house.quiet()
    assert num_prompt_tokens / 2 < num_prefill_tokens(house) - num_before < 1.5 * num_prompt_tokens


def num_prefill_tokens(house) -> int:
    return sum(worker.stats.num_prefill_tokens for worker in house.gw.dispatch.workers() if worker.stats)
