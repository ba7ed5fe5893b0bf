"""Tools in namespaces, and those that run elsewhere, as agents offer them in each request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import Front, OpenFront
from tests.gateway.responding import ask, prompt_of
from tests.gateway.test_chat_tools import TEMPLATE, say

pytestmark = pytest.mark.usefixtures("patient_store")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **others: Any) -> Any:
    return {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False, **others}


WEATHER: Any = {
    "type": "namespace",
    "name": "weather",
    "description": "Of the sky.",
    "tools": [function("now", description="What it does."), function("later")],
}
SERVER: Any = {"type": "namespace", "name": "mcp__files__", "description": "", "tools": [function("read")]}
TOOLS: Any = [function("now"), WEATHER, {"type": "web_search", "external_web_access": False}, SERVER]


def called(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Arden"}}}}\n</tool_call>\n'


@pytest.fixture
async def front(open_front: OpenFront):
    async with open_front(model={"template": TEMPLATE}) as opened:
        yield opened


async def test_a_tool_in_a_namespace_is_called_by_both_names(front: Front):
    call = ask(front, tools=TOOLS)
    submit = await say(front, "".join(map(called, ("weather__later", "now", "mcp__files__read"))))
    response = await call
    assert [(item.name, item.namespace) for item in response.output] == [
        ("later", "weather"),
        ("now", None),
        ("read", "mcp__files__"),
    ]
    assert "namespace" not in response.output[1].model_fields_set
    shown = [json.loads(line) for line in front.text.decode(submit.prompt_token_ids).split("\n") if line[:2] == '{"']
    assert [(tool["function"]["name"], tool["function"].get("description")) for tool in shown] == [
        ("now", None),
        ("weather__now", "Of the sky.\n\nWhat it does."),
        ("weather__later", None),
        ("mcp__files__read", None),
    ]
    # What the model reads again is what it wrote.
    outputs: Any = [{"type": "function_call_output", "call_id": i.call_id, "output": "rain"} for i in response.output]
    by_id, _ = await prompt_of(front, ask(front, input=outputs, previous_response_id=response.id))
    given: Any = [{"role": "user", "content": "Hello"}, *response.output, *outputs]
    as_it_stands, _ = await prompt_of(front, ask(front, input=given))
    assert by_id == as_it_stands
    assert '"weather__later"' in by_id


async def test_a_stream_says_the_namespace_with_the_name(front: Front):
    async with front.client.responses.stream(model="demo", input="Hello", tools=TOOLS) as stream:
        saying = asyncio.create_task(say(front, called("weather__now"), num_tokens=1))
        events = [event async for event in stream]
        await saying
    told = [event.item for event in events if event.type in ("response.output_item.added", "response.output_item.done")]
    assert [(item.name, item.namespace) for item in told] == [("now", "weather")] * 2


async def test_functions_in_a_namespace_are_strict_as_others_are(front: Front):
    silent = {**WEATHER, "tools": [function("now", strict=None), function("later")]}
    call = ask(front, tools=[SERVER, silent])
    submit = await say(front, "Hello.")
    _, space = (await call).tools
    assert [tool.strict for tool in space.tools] == [True, False]
    assert submit.grammar is not None
    assert "weather__now" in submit.grammar.source


async def test_a_search_of_the_web_beside_other_tools_is_not_offered_and_not_said_to_be(front: Front):
    prompts = []
    for tools in (TOOLS, [tool for tool in TOOLS if tool["type"] != "web_search"]):
        prompt, response = await prompt_of(front, ask(front, tools=tools))
        prompts.append(prompt)
        assert [tool.type for tool in response.tools] == ["function", "namespace", "namespace"]
    assert prompts[0] == prompts[1]
