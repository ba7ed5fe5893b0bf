"""The tools of a response, which a chat says one level deeper."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, UnsetType

from gateway import openai
from gateway.openai import Malformed
from gateway.responses.unserved import check_served

MAX_NESTING = 200
UNSERVED = {"allowed_callers": ["direct"], "async": False, "defer_loading": False, "output_schema": None}
"""Fields of tools: every call is the model's own, and is waited for."""
PASSED_OVER = ("web_search",)
"""Tools that run at OpenAI and that programs offer beside their own whether or not anybody searches, as Codex does: a
model that has others does without. ``tools`` of the response does not name them."""
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool that the client runs itself, as are all."""

    name: ToolName
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

    name: ToolName
    description: str | None = None
    format: AnyText | InGrammar = AnyText()


Tool = FunctionTool | CustomTool


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """Tools that have a name in common: a call says it beside that of the tool."""

    name: ToolName
    description: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)]

    def of_chat(self) -> Iterator[Tool]:
        """Each under both names; what is said of all stands before the first."""
        said = self.description
        for tool in self.tools:
            description = "\n\n".join([text for text in (said, tool.description) if text]) or None
            yield msgspec.structs.replace(tool, name=full_name(self.name, tool.name), description=description)
            said = None


AnyTool = Tool | NamespaceTool


def full_name(namespace: str | UnsetType | None, name: str) -> str:
    """By which a model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def tools_of(asked: Sequence[dict[str, Any]] | None) -> list[AnyTool]:
    """Raises Malformed."""
    given = list(enumerate(asked or ()))
    if any(each.get("type") not in PASSED_OVER for _, each in given):
        given = [(number, each) for number, each in given if each.get("type") not in PASSED_OVER]
    tools: list[AnyTool] = []
    for number, each in given:
        path = f"tools[{number}]"
        if each.get("type") != "namespace":
            tools.append(_tool_of(each, path, "'function', 'custom' and 'namespace' are"))
            continue
        inner = openai.converted(each.get("tools"), list[dict[str, Any]], f"{path}.tools")
        own = [_tool_of(tool, f"{path}.tools[{i}]", "'function' and 'custom' are") for i, tool in enumerate(inner)]
        tools.append(msgspec.structs.replace(openai.converted({**each, "tools": []}, NamespaceTool, path), tools=own))
    return tools


def _tool_of(given: dict[str, Any], path: str, served: str) -> Tool:
    kind = given.get("type")
    if kind not in ("function", "custom"):
        shown = f"'{kind[:40]}'" if isinstance(kind, str) else "this"
        raise Malformed(
            f"Invalid '{path}.type': {shown} is not supported by this server, {served}",
            f"{path}.type",
            "unsupported_value",
        )
    check_served(given, path, UNSERVED)
    if kind == "custom":
        given = {name: value for name, value in given.items() if value is not None}
        return openai.converted(given, CustomTool, path)
    tool = openai.converted(given, FunctionTool, path)
    check_nesting(tool.parameters, f"{path}.parameters")
    return tool


def callable_of(tools: Sequence[AnyTool]) -> list[Tool]:
    """All that may be called, by the names that the model knows."""
    return [each for tool in tools for each in (tool.of_chat() if isinstance(tool, NamespaceTool) else (tool,))]


def paths_of(asked: Sequence[dict[str, Any]] | None) -> list[str]:
    """Where each of them stands in the request."""
    paths = []
    for number, given in enumerate(asked or ()):
        if given["type"] == "namespace":
            paths += [f"tools[{number}].tools[{inner}]" for inner in range(len(given["tools"]))]
        elif given["type"] not in PASSED_OVER:
            paths.append(f"tools[{number}]")
    return paths


def names_of(tools: Sequence[AnyTool]) -> dict[str, tuple[str, str]]:
    """Of tools with a namespace, by the name that the model knows: that, and their own."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {full_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}


def saying(given: dict[str, Any], strict: Collection[str], namespace: str | None = None) -> dict[str, Any]:
    """A tool that was checked, whose functions all say whether they are ``strict``: those of these names are, if they
    did not say it."""
    if given["type"] == "namespace":
        return {**given, "tools": [saying(tool, strict, given["name"]) for tool in given["tools"]]}
    if given["type"] != "function" or given.get("strict") is not None:
        return given
    return {**given, "strict": full_name(namespace, given["name"]) in strict}


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


def tool_of_chat(tool: Tool) -> dict[str, Any]:
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
