"""Messages as chat templates expect them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway import openai
from gateway.text.template import ChatTemplate


def num_chars(
    messages: Sequence[openai.Message],
    tools: Sequence[dict[str, Any]] | None,
    switches: Mapping[str, Any] | None,
) -> int:
    """About how long the rendered conversation will be, if the template says all of it."""
    total = sum(map(_size, filter(None, (tools, switches))))
    for message in messages:
        content = message.content
        total += 20 + len(content if isinstance(content, str) else message.text)
        if message.tool_calls or message.function_call is not None:
            total += sum(
                100 + len(call.called.name) + len(call.id or "") + _size(call.called.arguments)
                for call in message.calls
            )
        if not message.is_plain or message.name is not None:
            total += sum(map(len, filter(None, (message.name, message.tool_call_id, message.thought))))
    return total


def _size(value: Any) -> int:
    """About how long it is when it is written out."""
    if isinstance(value, str):
        return len(value)
    try:
        return len(msgspec.json.encode(value))
    except (OverflowError, ValueError, RecursionError):  # a number of more than 64 bits, or lists in lists: read apart
        return sys.maxsize


def as_dict(message: openai.Message, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it: text in one string, arguments as an object, and no key without a value."""
    content, role = message.content, message.role
    if message.is_plain and message.name is None:
        return {"role": role, "content": content}
    if role == "developer" and not template.knows_developer:
        role = "system"
    elif role == "function":
        role = "tool"
    entry: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else message.text}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = template.id_of(message.tool_call_id)
    if message.thought is not None:
        entry["reasoning_content"] = message.thought
        # gpt-oss's template refuses it together with a text, where something is called.
        if template.knows_thinking and not (message.calls and entry["content"]):
            entry["thinking"] = message.thought
    if message.calls:
        entry["tool_calls"] = [
            {
                "id": template.id_of(call.id or ""),
                "type": "function",
                "function": {"name": called.name, "arguments": _arguments(called.arguments)},
            }
            for call in message.calls
            for called in (call.called,)
        ]
    return entry


def with_arguments_as_text(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These messages, with the arguments of their calls written out; empty where there are none."""
    has_calls = False
    texts = []
    for message in told:
        if "tool_calls" in message:
            has_calls = True
            calls = [
                call | {"function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = message | {"tool_calls": calls}
        texts.append(message)
    return texts if has_calls else []


def _text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments
