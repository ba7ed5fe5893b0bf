"""Calls and reasoning in chat completions, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import openai
from gateway.parsers import gathered
from gateway.parsers.reader import Wanted
from gateway.reply.choices import Choice
from gateway.text import Text
from policies import wire
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.texts import CHATML

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{# </think> #}"


def tool(name: str, **others: object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


TOOLS = [tool("get_weather", description="The weather"), tool("get_time")]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Arden"}}\n</tool_call>'
TIME = '\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Größe"}}\n</tool_call>'


@pytest.fixture
async def front(open_front: OpenFront):
    async with open_front(model={"template": TEMPLATE}) as opened:
        yield opened


async def say(front: Front, text: str, reason: str = "stop", num_tokens: int = 3, **others: Any) -> wire.Submit:
    """The worker answers the next request, a few tokens a step."""
    submit = await front.peer.submitted()
    token_ids = [*front.ids(text), *([3] if reason == "stop" else [])]
    for start in range(0, len(token_ids), num_tokens):
        piece = token_ids[start : start + num_tokens]
        is_last = start + num_tokens >= len(token_ids)
        logprobs = None
        if submit.sampling.num_logprobs is not None:
            logprobs = [wire.TokenLogprob(-1.0, [], []) for _ in piece]
        front.peer.say(submit, piece, reason if is_last else None, logprobs=logprobs, **others)  # type: ignore[arg-type]
    return submit


async def test_a_call_is_an_answer(front: Front):
    call = front.chat(tools=TOOLS)
    submit = await say(front, "I look.\n" + WEATHER + TIME)
    answer = await call
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == (
        "function",
        "get_weather",
        '{"city": "Arden"}',
    )
    assert (second.function.name, json.loads(second.function.arguments)) == ("get_time", {"city": "Größe"})
    assert first.id.startswith("call_")
    assert first.id != second.id
    prompt = front.text.decode(submit.prompt_token_ids)
    assert prompt.startswith('{"type": "function", "function": {"name": "get_weather", "description": "The weather"')
    (row,) = front.rows()
    assert row["num_completion_tokens"] == len(front.ids("I look.\n" + WEATHER + TIME)) + 1
    assert row["finish_reason"] == "tool_calls"


async def test_a_stream_names_each_call_once_and_its_arguments_piece_by_piece(front: Front):
    call = front.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True})
    await say(front, WEATHER + TIME, num_tokens=1)
    chunks = [chunk async for chunk in await call]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert (deltas[0].role, deltas[0].content, deltas[0].tool_calls) == ("assistant", None, None)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    begun = [piece for piece in pieces if piece.id]
    assert [(piece.index, piece.type, piece.function.name, piece.function.arguments) for piece in begun] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_time", ""),
    ]
    for number, city in enumerate(("Arden", "Größe")):
        told = [piece.function.arguments for piece in pieces if piece.index == number and not piece.id]
        assert json.loads("".join(told)) == {"city": city}
    assert all(piece.function.name is None for piece in pieces if not piece.id)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(front.ids(WEATHER + TIME)) + 1


async def test_the_client_s_own_accumulation_has_the_call(front: Front):
    async with front.client.chat.completions.stream(model="demo", messages=HELLO, tools=TOOLS) as stream:
        reading = asyncio.create_task(stream.get_final_completion())
        await say(front, WEATHER)
        (choice,) = (await reading).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Arden"}')


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time_ends_the_answer_with_the_first(front: Front, stream):
    call = front.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids(WEATHER + TIME))
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    answer = await call
    if stream:
        pieces = [chunk.choices[0] async for chunk in answer]
        calls = [call for piece in pieces for call in piece.delta.tool_calls or () if call.id]
        reason = pieces[-1].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    assert [call.function.name for call in calls] == ["get_weather"]
    assert reason == "tool_calls"


async def test_a_call_that_is_cut_says_so(front: Front):
    call = front.chat(tools=TOOLS, max_tokens=400)
    await say(front, WEATHER[:-17], "length")
    (choice,) = (await call).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Arde'


def test_tools_are_looked_through_once_and_not_again_on_the_event_loop():
    body = {"model": "demo", "messages": HELLO, "tools": [tool(f"tool_{number}") for number in range(300)]}
    call = openai.parse_chat(json.dumps(body).encode())  # beside the loop, where the body is long
    assert call.tooling() is not None
    assert call.tooling() is call.tooling()


async def test_without_tools_or_with_none_wanted_a_call_is_text(front: Front):
    for others in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        call = front.chat(**others)
        submit = await say(front, WEATHER)
        (choice,) = (await call).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (WEATHER, None, "stop")
        assert "get_weather" not in front.text.decode(submit.prompt_token_ids)


async def test_of_the_allowed_tools_alone_calls_are_calls(front: Front):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    call = front.chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    submit = await say(front, WEATHER + TIME)
    message = (await call).choices[0].message
    assert (message.content, [call.function.name for call in message.tool_calls]) == (WEATHER, ["get_time"])
    assert "get_weather" in front.text.decode(submit.prompt_token_ids)


async def test_calls_and_their_results_go_back_into_the_prompt(front: Front):
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Arden"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    call = front.chat(messages=messages, tools=TOOLS)
    submit = await say(front, "Sunny.")
    assert (await call).choices[0].message.content == "Sunny."
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Arden"}}</tool_call>'
        in front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_older_functions_are_called_in_the_older_way(front: Front, stream):
    call = front.chat(functions=[tool["function"] for tool in TOOLS], function_call="auto", stream=stream)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids(WEATHER + TIME))
    front.peer.say(submit, [], "cancelled")
    answer = await call
    if stream:
        choices = [chunk.choices[0] async for chunk in answer]
        told = [choice.delta.function_call for choice in choices if choice.delta.function_call]
        name, arguments = told[0].name, "".join(piece.arguments for piece in told)
        reason = choices[-1].finish_reason
        assert all(choice.delta.tool_calls is None for choice in choices)
    else:
        (choice,) = answer.choices
        name, arguments = choice.message.function_call.name, choice.message.function_call.arguments
        reason = choice.finish_reason
        assert choice.message.tool_calls is None
    assert (name, arguments, reason) == ("get_weather", '{"city": "Arden"}', "function_call")


async def test_several_answers_have_each_its_calls(front: Front):
    call = front.chat(tools=TOOLS, n=2)
    submit = await front.peer.submitted()
    assert submit.num_sequences == 2
    front.peer.say(submit, [*front.ids(WEATHER), 3], "stop", index=1)
    front.peer.say(submit, [*front.ids("Hello"), 3], "stop", index=0)
    first, second = (await call).choices
    assert (first.message.content, first.finish_reason) == ("Hello", "stop")
    assert (second.message.content, second.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_calls_have_their_log_probabilities(front: Front, stream):
    call = front.chat(tools=TOOLS, logprobs=True, stream=stream)
    await say(front, "Look " + WEATHER)
    answer = await call
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries) == ("Look " + WEATHER).encode()


async def test_a_stop_string_counts_in_calls_too(front: Front):
    call = front.chat(tools=TOOLS, stop="Arden")
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids(WEATHER))
    front.peer.say(submit, [], "cancelled")
    (choice,) = (await call).choices
    assert choice.message.tool_calls[0].function.arguments == '{"city": "'


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_from_the_answer_and_counted(open_front: OpenFront, stream):
    async with open_front(model={"template": THINKING}) as front:
        call = front.chat(stream=stream, stream_options={"include_usage": True} if stream else None, tools=TOOLS)
        submit = await say(front, "I think.\n</think>\n\nHello" + WEATHER, num_tokens=1)
        answer = await call
        if stream:
            chunks = [chunk async for chunk in answer]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            content = "".join(delta.content or "" for delta in deltas)
            num_calls = sum(1 for delta in deltas if delta.tool_calls and delta.tool_calls[0].id)
            usage = chunks[-1].usage
        else:
            (choice,) = answer.choices
            reasoning, content = choice.message.reasoning_content, choice.message.content
            num_calls, usage = len(choice.message.tool_calls), answer.usage
        assert (reasoning, content, num_calls) == ("I think.", "Hello", 1)
        num_reasoning = len(front.ids("I think.\n</think>"))
        # What closes it may share a token with what follows.
        assert abs(usage.completion_tokens_details.reasoning_tokens - num_reasoning) <= 1
        (row,) = await front.settled(1)
        assert row["num_reasoning_tokens"] == usage.completion_tokens_details.reasoning_tokens
        assert submit.prompt_token_ids


async def test_reasoning_effort_is_told_to_the_template(open_front: OpenFront):
    template = CHATML + "{{ reasoning_effort }} {{ verbosity }} {{ enable_thinking }}"
    async with open_front(model={"template": template}) as front:
        for others, told in (
            ({"reasoning_effort": "high", "verbosity": "low"}, "high low True"),
            ({"reasoning_effort": "none"}, "  False"),
            ({"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"enable_thinking": 7}}}, "low  7"),
            ({}, "  "),
        ):
            call = front.chat(**others)
            submit = await say(front, "Hello")
            await call
            assert front.text.decode(submit.prompt_token_ids).endswith("assistant\n" + told)


async def test_kept_answers_give_the_same_calls_and_one_call_is_not_taken_for_all(front: Front):
    async def asked(**others: object) -> tuple[list[str], str]:
        body = {"model": "demo", "messages": HELLO, "tools": TOOLS, "temperature": 0, **others}
        status, answer, headers = await front.post("/v1/chat/completions", body)
        assert status == 200, answer
        calls = answer["choices"][0]["message"]["tool_calls"]
        return [call["function"]["name"] for call in calls], headers["x-penstock-cache"]

    one = asyncio.create_task(asked(parallel_tool_calls=False))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids(WEATHER + TIME))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    assert await one == (["get_weather"], "miss")
    both = asyncio.create_task(asked())
    await say(front, WEATHER + TIME)
    assert await both == (["get_weather", "get_time"], "miss")
    assert await asked() == (["get_weather", "get_time"], "hit")
    assert await asked(parallel_tool_calls=False) == (["get_weather"], "hit")


async def test_a_template_that_knows_no_tools_is_told_in_words(open_front: OpenFront):
    async with open_front(model={"template": CHATML}) as front:
        call = front.chat(tools=TOOLS)
        submit = await say(front, '{"name": "get_weather", "arguments": {"city": "Arden"}}')
        message = (await call).choices[0].message
        assert (message.content, message.tool_calls[0].function.name) == (None, "get_weather")
        prompt = front.text.decode(submit.prompt_token_ids)
        assert prompt.startswith("system\nYou can call these functions:\n" + '{"name": "get_weather"')
        answered = [
            {"role": "system", "content": "Be brief."},
            *HELLO,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        ]
        call = front.chat(messages=answered, tools=TOOLS)
        submit = await say(front, "Sunny.")
        assert (await call).choices[0].message.content == "Sunny."
        prompt = front.text.decode(submit.prompt_token_ids)
        assert prompt.startswith("system\nBe brief.\n\nYou can call these functions:")
        assert 'assistant\n{"name": "get_weather", "arguments": {"city": "Arden"}}' in prompt
        assert "user\nget_weather gave: sunny" in prompt


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
            ["get_weather"],
        ),
    ],
)
async def test_a_call_that_has_to_be_made_is_a_grammar_for_the_worker(front: Front, choice, names):
    call = front.chat(tools=TOOLS, tool_choice=choice)
    text = TIME.strip() if names == ["get_time"] else WEATHER
    submit = await front.peer.submitted()
    assert submit.grammar is not None
    assert submit.grammar.kind == "lark"
    assert [name for name in ("get_weather", "get_time") if f'\\"{name}\\"' in submit.grammar.source] == names
    front.peer.say(submit, [*front.ids(text), 3], "stop")
    if isinstance(choice, dict) and choice["type"] == "function":  # one call is all
        front.peer.say(submit, [], "cancelled")
    (called,) = (await call).choices[0].message.tool_calls
    assert called.function.name in names


async def test_strict_functions_are_a_grammar_and_a_schema_that_cannot_be_one_is_refused_by_its_path(front: Front):
    call = front.chat(tools=[tool("get_weather", strict=True), tool("get_time")])
    submit = await say(front, "Hello")
    assert (await call).choices[0].message.content == "Hello"
    assert submit.grammar is not None
    assert submit.grammar.is_strict
    call = front.chat(tools=TOOLS)
    assert (await say(front, "Hello")).grammar is None
    await call
    bad = tool("get_time", strict=True)
    bad["function"]["parameters"] = {"type": "object", "properties": {"city": {"type": "place"}}}
    body = {"model": "demo", "messages": HELLO, "tools": [TOOLS[0], bad]}
    status, answer, _ = await front.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"].startswith("tools[1].function.parameters.properties.city")
    # What is not strict is held to as much as can be.
    del bad["function"]["strict"]
    call = front.chat(tools=[bad], tool_choice="required")
    submit = await front.peer.submitted()
    assert submit.grammar is not None
    front.peer.say(submit, [*front.ids(TIME.strip()), 3], "stop")
    assert (await call).choices[0].message.tool_calls[0].function.name == "get_time"


names = st.sampled_from(["get_weather", "get_time"])
values = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
arguments = st.dictionaries(st.text("abc", min_size=1, max_size=3), values | st.integers(-99, 99), max_size=3)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(str.strip),
    st.lists(st.tuples(names, arguments), max_size=3),
    st.lists(st.integers(1, 9)),
)
def test_what_a_template_writes_of_calls_is_read_back_however_its_tokens_arrive(content, called, sizes):
    """With the demo model's own template and tokens."""
    text = demo()
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in called]
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    rendered = text._templates["default"].render([*HELLO, said], None, {"add_generation_prompt": False})
    _, _, answer = rendered.rpartition("<|im_start|>assistant\n")
    token_ids = text._tokenizer.encode(answer.removesuffix("<|im_end|>\n"), add_special_tokens=False).ids
    parsers = text.tongue.parsers(Wanted(frozenset({"get_weather", "get_time"}), True), False)
    choice = Choice(0, text.decoder(), parser=parsers())
    events, start = [], 0
    for size in [*sizes, len(token_ids)]:
        choice.take(wire.Delta("r", 0, token_ids[start : start + size]))
        events += choice.take_events()
        start += size
    choice.take(wire.Delta("r", 0, [], None, wire.Finish("stop", 0, 0, 0.0, 0.0, 0.0)))
    read = gathered([*events, *choice.take_events()])
    assert (read.content or "") == content
    assert [(call.name, json.loads(call.arguments)) for call in read.calls] == called
    assert choice.ended_as == ("tool_calls" if called else "stop")


@cache
def demo() -> Text:
    return Text.load(Path(__file__).parents[2] / "demo" / "model")
