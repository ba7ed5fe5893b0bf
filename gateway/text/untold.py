"""Tools for models whose chat template knows of none: told in the system message, called as plain JSON.

Calls and their results go back into the conversation as what the assistant and the user said. What the user says
behind results is one turn with them, as some templates (Gemma's) want turns to alternate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = (
    "You can call these functions:\n{tools}\n"
    'To call one, answer with nothing but a JSON object of the form {{"name": NAME, "arguments": {{...}}}}; to call '
    "several, with an array of such objects. Otherwise answer in words."
)


def told(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], knows_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation with all that it says of tools in words. ``knows_system``: the template takes what a system
    says; otherwise the user's first turn has it."""
    names = _names(messages)
    plain: list[dict[str, Any]] = []
    is_behind = False
    for message in messages:
        said = _plain(message, names)
        if is_behind and said["role"] == "user":
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{said['content']}"}
        else:
            plain.append(said)
            is_behind = message["role"] == "tool"
    if not tools:
        return plain
    introduction = _INTRODUCTION.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    first = next((place for place, message in enumerate(plain) if message["role"] == "user"), None)
    if not knows_system and first is not None:
        begun = {**plain[first], "content": f"{introduction}\n\n{plain[first]['content']}"}
        return [*plain[:first], begun, *plain[first + 1 :]]
    if plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _names(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of what was called, by the ids of the calls."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {call["id"]: call["function"]["name"] for call in calls if call["id"]}


def _plain(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if message["role"] == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id", ""), "the function")
        return {"role": "user", "content": f"{name} gave: {message['content']}"}
    if "tool_calls" in message:
        calls = [_json(call["function"]) for call in message["tool_calls"]]
        said = calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]"
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**rest, "content": "\n".join(text for text in (message["content"], said) if text)}
    return message


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
