"""Within what the official client can ask nothing is passed over in silence either: every field of every object there
is known, and done, refused by name, or of no consequence here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import openai
import pytest
import typing_extensions
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params, item_create_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params

from gateway.openai import Malformed
from gateway.openai.custom import Custom
from gateway.openai.messages import CustomCall, FunctionCall, Message, TextPart, ToolCall
from gateway.openai.requests import Prediction, StreamOptions
from gateway.openai.tools import Allowed, Choice, Function, Tool
from gateway.responses import items, requests, tools
from gateway.responses.context import CacheOptions, Compaction, ImageOptions
from tests.gateway.responding import ask, prompt_of
from tests.gateway.test_conversations import said
from tests.gateway.test_official_fields import fields

Known = Mapping[str | None, set[str]]
"""By the types of objects at one place, their fields; None: whatever type they have, or have not. What has another type
is refused for it."""
Tree = Mapping[str, Known]
"""By place."""
HINTED = {"prompt_cache_breakpoint"}
PARTS = {
    "input_text": fields(items.InputText) | HINTED,
    "output_text": fields(items.OutputText) | HINTED,
    "refusal": fields(items.OutputRefusal),
}
ITEMS: Tree = {
    "": {
        **{kind: fields(each) | {*items.UNSERVED, *items.SEALED, *items.HINTS} for kind, each in items._TYPES.items()},
        "item_reference": fields(items.ItemReference),
    },
    ".content": {**PARTS, "reasoning_text": fields(items.ReasoningText)},
    ".summary": {"summary_text": fields(items.SummaryText)},
    ".output": PARTS,
}
TOOLS: Tree = {
    "tools": {
        "function": fields(tools.FunctionTool) | set(tools.UNSERVED),
        "custom": fields(tools.CustomTool) | set(tools.UNSERVED),
        "namespace": fields(tools.NamespaceTool),
    },
    "tools.tools": {
        "function": fields(tools.FunctionTool) | set(tools.UNSERVED),
        "custom": fields(tools.CustomTool) | set(tools.UNSERVED),
    },
    "tools.tools.format": {"text": fields(tools.AnyText), "grammar": fields(tools.InGrammar)},
    "tools.format": {"text": fields(tools.AnyText), "grammar": fields(tools.InGrammar)},
    "tool_choice": {"function": {"name"}, "custom": {"name"}, "allowed_tools": {"mode", "tools"}},
}
RESPONSE: Tree = {
    **{f"input{place}": known for place, known in ITEMS.items()},
    **TOOLS,
    "background_options": {None: fields(requests.BackgroundOptions)},
    "context_management": {None: fields(Compaction)},
    "conversation": {None: fields(requests.ConversationRef)},
    "image": {None: fields(ImageOptions)},
    "prompt_cache_options": {None: fields(CacheOptions)},
    "reasoning": {None: fields(requests.Reasoning)},
    "stream_options": {None: fields(StreamOptions)},
    "text": {None: fields(requests.TextConfig)},
    "text.format": {None: fields(requests.TextFormat)},
}
CHAT: Tree = {
    "messages": {None: fields(Message)},
    "messages.content": {"text": fields(TextPart) | HINTED, "refusal": fields(TextPart)},
    "messages.function_call": {None: fields(FunctionCall)},
    "messages.tool_calls": {None: fields(ToolCall)},
    "messages.tool_calls.function": {None: fields(FunctionCall)},
    "messages.tool_calls.custom": {None: fields(CustomCall)},
    "function_call": {None: {"name"}},
    "functions": {None: fields(Function)},
    "prediction": {None: fields(Prediction)},
    "prediction.content": {"text": fields(TextPart) | HINTED},
    "prompt_cache_options": {None: fields(CacheOptions)},
    "response_format": {"text": set(), "json_object": set(), "json_schema": {"json_schema"}},
    "response_format.json_schema": {None: {"name", "schema", "description", "strict"}},
    "stream_options": {None: fields(StreamOptions)},
    "tools": {None: fields(Tool)},
    "tools.function": {None: fields(Function)},
    "tools.custom": {None: fields(Custom)},
    "tools.custom.format": {"text": set(), "grammar": {"grammar"}},
    "tools.custom.format.grammar": {None: {"syntax", "definition"}},
    "tool_choice": {None: fields(Choice)},
    "tool_choice.allowed_tools": {None: fields(Allowed)},
    "tool_choice.function": {None: {"name"}},
    "tool_choice.custom": {None: {"name"}},
}
KEPT: Tree = {place: {None: {"anchor", "seconds"}} for place in ("expires_after", "output_expires_after")}
NOT_SERVED = {"access_programs", "audio", "caller", "moderation", "prompt", "web_search_options"}
"""Refused as a whole, wherever they are."""
OF_NO_CONSEQUENCE = {"annotations", "logprobs", "prompt_cache_breakpoint"}


def objects(hint: Any) -> Iterator[Any]:
    """All that a value of this type may be."""
    if typing_extensions.is_typeddict(hint):
        yield hint
    for inner in get_args(hint):
        yield from objects(inner)


def kinds_of(theirs: Any) -> set[str]:
    hint = typing_extensions.get_type_hints(theirs).get("type")
    return {kind for kind in get_args(hint) if isinstance(kind, str)} if get_origin(hint) is Literal else set()


def unknown(theirs: Any, ours: Tree, place: str = "") -> Iterator[str]:
    """Fields below ``place`` of which nobody here has heard."""
    for name, hint in typing_extensions.get_type_hints(theirs).items():
        if name in NOT_SERVED | OF_NO_CONSEQUENCE:
            continue
        below = f"{place}.{name}" if place else name
        for each in objects(hint):
            known = ours.get(below)
            if known is None:
                yield below
                continue
            kinds = kinds_of(each)
            allowed = [known[kind] for kind in (*kinds, None) if kind in known]
            if allowed:  # else its type is refused
                asked = set(typing_extensions.get_type_hints(each)) - {"type"}
                yield from (f"{below}.{field} ({each.__name__})" for field in asked - set.union(*allowed))
                yield from unknown(each, ours, below)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (response_create_params.ResponseCreateParamsStreaming, RESPONSE),
        (response_compact_params.ResponseCompactParams, RESPONSE),
        (input_token_count_params.InputTokenCountParams, RESPONSE),
        (chat_params.CompletionCreateParamsStreaming, CHAT),
        (completion_create_params.CompletionCreateParamsStreaming, {"stream_options": CHAT["stream_options"]}),
        (embedding_create_params.EmbeddingCreateParams, {}),
        (conversation_create_params.ConversationCreateParams, {f"items{place}": each for place, each in ITEMS.items()}),
        (item_create_params.ItemCreateParams, {f"items{place}": each for place, each in ITEMS.items()}),
        (batch_create_params.BatchCreateParams, KEPT),
        (file_create_params.FileCreateParams, KEPT),
        (upload_create_params.UploadCreateParams, KEPT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_field_within_a_request_is_known(theirs: Any, ours: Tree):
    assert list(unknown(theirs, ours)) == []


def test_what_has_a_type_that_is_not_served_is_refused_for_it():
    hints = typing_extensions.get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    for name, parse, known in (
        ("input", items.parse, RESPONSE["input"]),
        ("tools", tools.tools_of, RESPONSE["tools"]),
    ):
        kinds = set().union(*(kinds_of(each) for each in objects(hints[name]))) - set(known)
        others = {kind for kind in kinds if kind not in ITEMS[".content"]}
        assert len(others) > 5
        for kind in others:
            with pytest.raises(Malformed) as refused:
                parse([{"type": kind}])
            assert (refused.value.param, refused.value.code) == (f"{name}[0].type", "unsupported_value")


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"}
OUTPUTS = [
    {"type": f"{kind}_output", "call_id": id, "output": "4"}
    for kind, id in (("function_call", "c"), ("custom_tool_call", "d"))
]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
CUSTOM = {"type": "custom", "name": "g"}
SPACE = {"type": "namespace", "name": "n", "description": "Some."}
PROGRAM = {"type": "program", "caller_id": "p"}


OF_CALLS: list[tuple[str, Any]] = [("async", True), ("caller", PROGRAM)]
OF_TOOLS: list[tuple[str, Any]] = [
    *(("async", True), ("defer_loading", True)),
    *(("allowed_callers", ["programmatic"]), ("output_schema", {})),
]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        *[
            ({"input": [{**call, name: value}]}, f"input[0].{name}")
            for call in (CALL, CUSTOM_CALL)
            for name, value in OF_CALLS
        ],
        *[({"input": [CALL, CUSTOM_CALL, {**output, "caller": PROGRAM}]}, "input[2].caller") for output in OUTPUTS],
        *[
            ({"tools": [CUSTOM, {**tool, name: value}]}, f"tools[1].{name}")
            for tool in (FUNCTION, CUSTOM)
            for name, value in OF_TOOLS
        ],
        (
            {"tools": [CUSTOM, {**SPACE, "tools": [{**FUNCTION, "defer_loading": True}]}]},
            "tools[1].tools[0].defer_loading",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"background_options": {"continuation_id": "x"}}, "background_options"),
    ],
)
async def test_what_is_asked_within_an_item_or_a_tool_and_cannot_be_done_is_refused_by_name(front, asked, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, **asked)
    assert refused.value.param == param
    assert "not supported by this server" in refused.value.message


async def test_a_chat_goes_on_from_no_audio(front):
    messages: list[Any] = [
        {"role": "assistant", "audio": {"id": "a"}, "content": "Hi"},
        {"role": "user", "content": "?"},
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        await front.client.chat.completions.create(model="demo", messages=messages)
    assert (refused.value.param, refused.value.code) == ("messages[0].audio", "unsupported_parameter")


async def test_what_says_how_it_is_here_anyway_changes_nothing(front):
    marked = {"type": "input_text", "text": "Hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    plain: list[Any] = [said("Hello"), said("Hi.", "assistant"), CALL, OUTPUTS[0], said("?")]
    direct = {"caller": {"type": "direct"}, "namespace": None}
    told: list[Any] = [
        {**said("Hello"), "content": [marked]},
        {**said("Hi.", "assistant"), "phase": "final_answer"},
        {**CALL, **direct, "async": False},
        {**OUTPUTS[0], **direct, "name": "f"},
        {**said("?"), "nobody_knows": {"this": 1}},
    ]
    usual = {"allowed_callers": ["direct"], "async": False, "defer_loading": False, "output_schema": None}
    prompts = []
    for given, tool in ((plain, FUNCTION), (told, {**FUNCTION, **usual})):
        prompt, response = await prompt_of(front, ask(front, input=given, tools=[tool], tool_choice="auto"))
        prompts.append(prompt)
        assert response.output_text == "Yes."
    assert prompts[0] == prompts[1]
    chat = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        }
    ]
    call = front.chat(messages=chat)
    front.peer.say(await front.peer.submitted(), [5, 3], "stop")
    await call
