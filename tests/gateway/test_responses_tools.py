"""Function calls and reasoning in responses, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from policies import wire
from policies.holding import Grammars
from tests.gateway.conftest import Front, OpenFront
from tests.gateway.responding import ASSISTANT, answered, ask, prompt_of, turn
from tests.gateway.test_chat_tools import TEMPLATE, THINKING, TIME, WEATHER, say

pytestmark = pytest.mark.usefixtures("patient_store")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "The weather", "parameters": PARAMETERS},
    {"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": False},
]


@pytest.fixture
async def front(open_front: OpenFront):
    async with open_front(model={"template": TEMPLATE}) as opened:
        yield opened


async def test_a_call_is_an_item_and_its_output_the_next_input(front: Front):
    call = ask(front, tools=TOOLS)
    submit = await say(front, "I look.\n" + WEATHER + TIME)
    response = await call
    message, first, second = response.output
    assert (message.type, response.output_text) == ("message", "I look.")
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Arden"},
    )
    assert (second.name, json.loads(second.arguments), second.status) == ("get_time", {"city": "Größe"}, "completed")
    assert first.call_id != second.call_id
    assert [tool.name for tool in response.tools] == ["get_weather", "get_time"]
    shown = front.text.decode(submit.prompt_token_ids)
    assert shown.startswith('{"type": "function", "function": {"name": "get_weather", "description": "The weather"')
    outputs: Any = [
        {"type": "function_call_output", "call_id": first.call_id, "output": "rain"},
        {"type": "function_call_output", "call_id": second.call_id, "output": [{"type": "input_text", "text": "noon"}]},
    ]
    by_id, _ = await prompt_of(front, ask(front, input=outputs, previous_response_id=response.id))
    as_it_stands, _ = await prompt_of(
        front, ask(front, input=[{"role": "user", "content": "Hello"}, *response.output, *outputs])
    )
    assert by_id == as_it_stands
    assert by_id.endswith(turn("tool", "rain") + turn("tool", "noon") + ASSISTANT)
    assert by_id.count("<|im_start|>assistant") == 2  # what was said and called is one turn


async def test_a_stream_names_a_call_and_then_its_arguments(front: Front):
    async with front.client.responses.stream(model="demo", input="Hello", tools=TOOLS) as stream:
        reading = asyncio.create_task(read(stream))
        await say(front, WEATHER + TIME, num_tokens=1)
        events = await reading
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.type, item.name, item.arguments) for item in added] == [
        ("function_call", "get_weather", ""),
        ("function_call", "get_time", ""),
    ]
    for number, city in enumerate(("Arden", "Größe")):
        mine = [event for event in events if getattr(event, "output_index", None) == number]
        told = "".join(event.delta for event in mine if event.type == "response.function_call_arguments.delta")
        (done,) = [event for event in mine if event.type == "response.function_call_arguments.done"]
        assert json.loads(told) == json.loads(done.arguments) == {"city": city}
        assert final.output[number].arguments == told


def function(name: str, parameters: Any = PARAMETERS, **others: Any) -> Any:
    return {"type": "function", "name": name, "parameters": parameters, **others}


async def held_as(front: Front, tools: list[Any], **others: Any) -> tuple[list[bool | None], wire.Grammar | None]:
    """Which of its tools the response calls strict, and what its answer is held to."""
    call = ask(front, tools=tools, **others)
    submit = await say(front, "Hello.")
    return [getattr(tool, "strict", None) for tool in (await call).tools], submit.grammar


async def test_a_function_that_does_not_say_is_strict_where_a_grammar_can_hold_its_schema(open_front: OpenFront):
    unheld = {"type": "object", "properties": {"a": {"type": "string", "format": "nobody-knows"}}}
    bounds = Grammars(max_bytes=2500)
    async with open_front(model={"template": TEMPLATE}, grammars=bounds) as front:
        for others in ({}, {"strict": None}):
            strict, grammar = await held_as(
                front, [function("get_weather", **others), function("get_time", strict=False)]
            )
            assert strict == [True, False]
            assert grammar is not None
            assert grammar.is_strict
            assert "get_time" in grammar.source
        assert await held_as(front, [function("get_weather", strict=False)]) == ([False], None)
        assert await held_as(front, [function("get_weather", unheld)]) == ([False], None), "it is not refused"
        strict, grammar = await held_as(front, [function("get_weather", unheld), function("get_time", None)])
        assert (strict, grammar is not None) == ([False, True], True)
        assert (await held_as(front, [function("get_weather")], tool_choice="none")) == ([True], None)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(front, tools=[function("get_weather", unheld, strict=True)])
        assert refused.value.param.startswith("tools[0].parameters")
        # Each can be held, and all of them are too much.
        long = {"type": "object", "properties": {"a": {"enum": ["x" * 600]}}}
        strict, grammar = await held_as(front, [function(f"f{each}", long) for each in range(4)])
        assert (strict, grammar) == ([False] * 4, None)


async def test_what_can_be_strict_is_found_out_once_for_the_same_functions_and_model(open_front: OpenFront):
    async with open_front(model={"template": TEMPLATE}) as front:

        async def num_looks(*tools: Any, **others: Any) -> int:
            """How often grammars were asked whether one can be read."""
            grammars = front.gw.grammars
            before = grammars.num_known_hits + grammars.num_read
            strict, grammar = await held_as(front, list(tools), **others)
            assert strict == [True] * len(tools)
            assert grammar is not None
            return grammars.num_known_hits + grammars.num_read - before

        silent, said = function("get_weather"), function("get_weather", strict=True)
        at_first, with_another = await num_looks(silent), await num_looks(silent, function("get_time"))
        assert at_first < with_another
        assert await num_looks(silent) == await num_looks(said) < at_first
        assert await num_looks(silent, tool_choice="required") > await num_looks(silent, tool_choice="required")
        bounded = function("get_weather", {**PARAMETERS, "additionalProperties": False})
        assert await num_looks(bounded) > await num_looks(bounded)


async def test_in_chats_a_function_is_strict_only_if_it_says_so(front: Front):
    call = front.chat(tools=[{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}])
    assert (await say(front, "Hello.")).grammar is None
    await call


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_tool_choice_is_what_a_chat_makes_of_it(front: Front):
    for choice in (
        "none",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
    ):
        response = await answered(front, WEATHER, tools=TOOLS, tool_choice=choice)
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text == WEATHER
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, tools=TOOLS, tool_choice={"type": "function", "name": "get_up"})
    assert refused.value.param == "tool_choice.name"
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, tools=[TOOLS[0], TOOLS[0]])
    assert refused.value.param == "tools[1].name"


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_reasoning_is_an_item_before_the_answer(open_front: OpenFront, summary):
    async with open_front(model={"template": THINKING}) as front:
        async with front.client.responses.stream(model="demo", input="Hello", reasoning={"summary": summary}) as stream:
            reading = asyncio.create_task(read(stream))
            await say(front, "It rains.</think>\n\nTake a coat.", num_tokens=1)
            events = await reading
            response = await stream.get_final_response()
        kind = "reasoning_text" if summary is None else "reasoning_summary_text"
        told = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        thought, message = response.output
        parts = thought.content if summary is None else thought.summary
        assert (thought.type, parts[0].text, told) == ("reasoning", "It rains.", "It rains.")
        assert (message.type, response.output_text) == ("message", "Take a coat.")
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        (row,) = front.rows()
        assert row["num_reasoning_tokens"] == response.usage.output_tokens_details.reasoning_tokens
        prompt, _ = await prompt_of(front, ask(front, input="And?", previous_response_id=response.id))
        assert turn("assistant", "Take a coat.") + turn("user", "And?") in prompt


async def test_effort_reaches_the_template(open_front: OpenFront):
    async with open_front(model={"template": THINKING}) as front:
        prompt, response = await prompt_of(front, ask(front, reasoning={"effort": "none"}), "Take a coat.")
        assert prompt.endswith(ASSISTANT)
        assert (response.reasoning.effort, response.output_text) == ("none", "Take a coat.")
