"""The tools of a response, which a chat says one level deeper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway import openai
from gateway.openai import Malformed
from gateway.responses.unserved import check_served

MAX_NESTING = 200
UNSERVED = {"allowed_callers": ["direct"], "async": False, "defer_loading": False, "output_schema": None}
"""Fields of tools: every call is the model's own, and is waited for."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool that the client runs itself, as are all."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Whatever a model writes."""


class InGrammar(msgspec.Struct, frozen=True, tag_field="type", tag="grammar"):
    """A text of this language."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """One that is given a text."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
    description: str | None = None
    format: AnyText | InGrammar = AnyText()


def tools_of(asked: Sequence[dict[str, Any]] | None) -> list[FunctionTool | CustomTool]:
    """Raises Malformed."""
    tools: list[FunctionTool | CustomTool] = []
    for number, given in enumerate(asked or ()):
        kind, path = given.get("type"), f"tools[{number}]"
        if kind not in ("function", "custom"):
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else "this"
            raise Malformed(
                f"Invalid '{path}.type': {shown} is not supported by this server, 'function' and 'custom' are",
                f"{path}.type",
                "unsupported_value",
            )
        check_served(given, path, UNSERVED)
        if kind == "custom":
            given = {name: value for name, value in given.items() if value is not None}
            tools.append(openai.converted(given, CustomTool, path))
            continue
        tool = openai.converted(given, FunctionTool, path)
        check_nesting(tool.parameters, f"{path}.parameters")
        tools.append(tool)
    return tools


def choice_of(choice: dict[str, Any]) -> dict[str, Any]:
    """A chat's ``tool_choice``, which names a function one level deeper."""
    match choice:
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return {"type": kind, kind: {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            allowed = [choice_of(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case _:
            raise Malformed(
                "Invalid 'tool_choice': it is none, auto, required, a tool by its type and name, or allowed_tools",
                "tool_choice",
                "unsupported_value",
            )


def tool_of_chat(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        custom: dict[str, Any] = {"name": tool.name, "format": {"type": "text"}}
        if isinstance(tool.format, InGrammar):
            definition = {"syntax": tool.format.syntax, "definition": tool.format.definition}
            custom["format"] = {"type": "grammar", "grammar": definition}
        if tool.description is not None:
            custom["description"] = tool.description
        return {"type": "custom", "custom": custom}
    said = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def check_nesting(schema: Any, path: str) -> None:
    """It is said again in the answer, and written by an encoder that goes no deeper than the interpreter does."""
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise Malformed(f"Invalid '{path}': it is nested too deeply", path)
