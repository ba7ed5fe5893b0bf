"""Custom tools in chats and responses, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Front, OpenFront
from tests.gateway.elsewhere import chunk, elsewhere, streams
from tests.gateway.responding import ASSISTANT, ask, prompt_of, turn
from tests.gateway.test_chat_tools import TEMPLATE, TIME, say, tool

pytestmark = pytest.mark.usefixtures("patient_store")

SUM = 'start: NUMBER (SP SIGN SP NUMBER)*\nSP: " "\nSIGN: /[-+]/\n%import common.NUMBER\n'
CODE = 'print("Größe")\n'


def in_grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def custom(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **others}}


TOOLS = [custom("run_code", description="Runs Python"), tool("get_time")]
OURS: Any = [
    {"type": "custom", "name": "run_code", "description": "Runs Python"},
    {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}},
]
RUN = f'<tool_call>\n{{"name": "run_code", "arguments": {json.dumps({"input": CODE})}}}\n</tool_call>'


@pytest.fixture
async def front(open_front: OpenFront):
    async with open_front(model={"template": TEMPLATE}) as opened:
        yield opened


async def test_a_custom_tool_is_called_with_text_and_a_function_beside_it_with_arguments(front: Front):
    call = front.chat(tools=TOOLS)
    submit = await say(front, RUN + TIME)
    (choice,) = (await call).choices
    first, second = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "run_code", CODE)
    assert (second.type, second.function.name) == ("function", "get_time")
    assert json.loads(second.function.arguments) == {"city": "Größe"}
    assert first.id != second.id
    assert submit.grammar is None
    shown = json.loads(front.text.decode(submit.prompt_token_ids).partition("\n")[0])["function"]
    assert (shown["name"], shown["description"], list(shown["parameters"]["properties"])) == (
        "run_code",
        "Runs Python",
        ["input"],
    )


async def test_a_stream_names_it_once_and_its_text_piece_by_piece(front: Front):
    call = front.chat(tools=TOOLS, stream=True)
    await say(front, RUN + TIME, num_tokens=1)
    deltas = [chunk.choices[0].delta for chunk in [chunk async for chunk in await call] if chunk.choices]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    begun = [piece for piece in pieces if piece.id]
    assert [(piece.index, piece.type) for piece in begun] == [(0, "custom"), (1, "function")]
    assert begun[0].custom == {"name": "run_code", "input": ""}  # the client's types know nothing of them in chunks
    told = [piece.custom["input"] for piece in pieces if piece.index == 0 and not piece.id]
    assert "".join(told) == CODE


async def test_what_was_called_stands_in_the_conversation_as_a_call_with_one_argument(front: Front):
    call = front.chat(tools=TOOLS)
    await say(front, RUN)
    message = (await call).choices[0].message
    messages = [
        {"role": "user", "content": "Go"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"},
    ]
    call = front.chat(messages=messages, tools=TOOLS)
    submit = await say(front, "Done.")
    await call
    prompt = front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
    assert f'{{"name": "run_code", "arguments": {json.dumps({"input": CODE}, ensure_ascii=False)}}}' in prompt
    assert prompt.endswith(turn("tool", "42") + ASSISTANT)


@pytest.mark.parametrize("choice", [custom("add"), "required", None])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", SUM), ("regex", r"^\d+ [-+] \d+$")])
async def test_a_grammar_holds_the_text_and_is_told_to_the_model(front: Front, choice, syntax, definition):
    others = {} if choice is None else {"tool_choice": choice}
    call = front.chat(tools=[custom("add", format=in_grammar(syntax, definition)), *TOOLS], **others)
    submit = await say(front, RUN.replace("run_code", "add").replace(json.dumps(CODE), '"4 + 4"'))
    (made,) = (await call).choices[0].message.tool_calls
    assert (made.custom.name, made.custom.input) == ("add", "4 + 4")
    assert submit.grammar is not None
    assert submit.grammar.kind == "lark"
    assert ('\\"run_code\\"' in submit.grammar.source) is not isinstance(choice, dict)
    assert json.dumps(definition)[1:20] in front.text.decode(submit.prompt_token_ids)


async def test_which_may_be_called_is_chosen_by_type_and_name(front: Front):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}
    call = front.chat(tools=TOOLS, tool_choice=choice)
    await say(front, RUN)
    assert (await call).choices[0].message.content == RUN
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [custom("run_code")]}}
    call = front.chat(tools=TOOLS, tool_choice=choice)
    submit = await say(front, RUN)
    assert (await call).choices[0].message.tool_calls[0].custom.input == CODE
    assert submit.grammar is not None
    assert "get_time" not in submit.grammar.source


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[0].custom", {"tools": [{"type": "custom"}]}),
        ("tools[0].custom.name", {"tools": [custom("a b")]}),
        ("tools[0].custom.format.type", {"tools": [custom("f", format={"type": "xml"})]}),
        ("tools[0].custom.format.grammar", {"tools": [custom("f", format={"type": "grammar"})]}),
        ("tools[0].custom.format.grammar.syntax", {"tools": [custom("f", format=in_grammar("gbnf", "x"))]}),
        ("tools[0].custom.format.grammar.definition", {"tools": [custom("f", format=in_grammar("lark", "start: a"))]}),
        ("tools[0].custom.format.grammar.definition", {"tools": [custom("f", format=in_grammar("regex", "(a"))]}),
        ("tools[0].custom.format.grammar.definition", {"tools": [custom("f", format=in_grammar("lark", ""))]}),
        (
            "tools[0].custom.format.grammar.definition",  # a model of this family writes it in JSON
            {"tools": [custom("f", format=in_grammar("lark", 'start: %json {"type": "object"}'))]},
        ),
        ("tools[1].custom.name", {"tools": [tool("f"), custom("f")]}),
        ("tool_choice.custom", {"tools": [custom("f")], "tool_choice": {"type": "custom"}}),
        ("tool_choice.custom.name", {"tools": [tool("f")], "tool_choice": custom("f")}),
        (
            "tool_choice.function.name",
            {"tools": [custom("f")], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            "messages[0].tool_calls[0].custom",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
        ),
        (
            "messages[0].tool_calls[0].custom.input",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", **custom("f")}]}]},
        ),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_it(front: Front, param, fields):
    with pytest.raises(openai.BadRequestError) as refused:
        await front.chat(**fields)
    assert refused.value.param == param


async def test_in_responses_a_call_is_an_item_and_its_output_the_next_input(front: Front):
    call = ask(front, tools=OURS)
    await say(front, RUN + TIME)
    response = await call
    first, second = response.output
    assert (first.type, first.name, first.input) == ("custom_tool_call", "run_code", CODE)
    assert (second.type, second.name) == ("function_call", "get_time")
    assert [tool.type for tool in response.tools] == ["custom", "function"]
    assert response.tools[0].format.type == "text"
    outputs: Any = [
        {"type": "custom_tool_call_output", "call_id": first.call_id, "output": "42"},
        {"type": "function_call_output", "call_id": second.call_id, "output": "noon"},
    ]
    by_id, _ = await prompt_of(front, ask(front, input=outputs, previous_response_id=response.id))
    as_it_stands, _ = await prompt_of(
        front, ask(front, input=[{"role": "user", "content": "Hello"}, *response.output, *outputs])
    )
    assert by_id == as_it_stands
    assert by_id.endswith(turn("tool", "42") + turn("tool", "noon") + ASSISTANT)
    items = await front.client.responses.input_items.list(response.id)
    assert [item.type for item in items.data] == ["message"]


async def test_in_responses_a_stream_tells_the_text_by_events_of_its_own(front: Front):
    tools: Any = [{**OURS[0], "format": {"type": "grammar", "syntax": "regex", "definition": r"[^q]+"}}, OURS[1]]
    choice: Any = {"type": "custom", "name": "run_code"}
    async with front.client.responses.stream(model="demo", input="Hello", tools=tools, tool_choice=choice) as stream:
        reading = asyncio.create_task(read(stream))
        submit = await say(front, RUN, num_tokens=1)
        events = await reading
        final = await stream.get_final_response()
    assert submit.grammar is not None
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(event.delta for event in told) == done.input == final.output[0].input == CODE
    assert {event.item_id for event in (*told, done)} == {final.output[0].id}
    assert final.tools[0].format.definition == r"[^q]+"


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[0].name", {"tools": [{"type": "custom"}]}),
        ("tools[0].format.type", {"tools": [{**OURS[0], "format": {"type": "xml"}}]}),
        (
            "tools[0].format.definition",
            {"tools": [{**OURS[0], "format": {"type": "grammar", "syntax": "lark", "definition": "start: a"}}]},
        ),
        ("tool_choice.name", {"tools": OURS, "tool_choice": {"type": "custom", "name": "get_time"}}),
        ("input", {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}),
    ],
)
async def test_in_responses_what_is_wrong_has_their_names(front: Front, param, fields):
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, **fields)
    assert refused.value.param == param


async def test_an_upstreams_custom_calls_come_through_in_both_apis(open_front: OpenFront):
    begun = {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "run_code", "input": ""}}
    parts = [{"index": 0, "custom": {"input": each}} for each in ("print", "(1)")]
    call = [*[chunk(tool_calls=[part]) for part in (begun, *parts)], chunk(finish="tool_calls"), "[DONE]"]
    async with elsewhere() as far, open_front(upstreams=(far.upstream(),)) as front:
        far.always = streams(*call)
        said = await front.client.chat.completions.create(
            model="far", messages=[{"role": "user", "content": "Go"}], tools=TOOLS, stream=True
        )
        pieces = [piece async for part in said if part.choices for piece in part.choices[0].delta.tool_calls or ()]
        assert [(piece.type, piece.custom["name"]) for piece in pieces[:1]] == [("custom", "run_code")]
        assert "".join(piece.custom["input"] for piece in pieces) == "print(1)"
        assert far.bodies[0]["tools"] == TOOLS
        (item,) = (await front.client.responses.create(model="far", input="Go", tools=OURS)).output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "run_code", "print(1)")
