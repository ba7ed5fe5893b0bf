"""Tools in a chat request: what may be called, whether it has to be, and how the older ``functions`` say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.openai.custom import Custom, Name
from gateway.openai.decoding import converted
from gateway.openai.failures import Malformed
from policies import wire

KINDS = ("function", "custom")
"""Of tools."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a function that says none."""


class Function(msgspec.Struct, frozen=True):
    """What can be called. ``parameters`` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFunction(Function, frozen=True):
    """A custom tool as a model sees it."""

    grammar: wire.Grammar | None = None
    """Of its input; None: any text."""


class Tool(msgspec.Struct, frozen=True):
    """``type``: functions and custom tools are called here."""

    type: str
    function: Function | None = None
    custom: Custom | None = None


class Named(msgspec.Struct, frozen=True):
    name: str


class Allowed(msgspec.Struct, frozen=True):
    """``tools`` in the form that ``tool_choice`` names one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class Choice(msgspec.Struct, frozen=True):
    """A ``tool_choice`` that is an object."""

    type: str
    function: Named | None = None
    custom: Named | None = None
    allowed_tools: Allowed | None = None


class Tooling(NamedTuple):
    """A request's tools, and what it wants of them."""

    shown: list[dict[str, Any]]
    """As a chat template expects them."""
    functions: tuple[Function, ...]
    """Those that may be called."""
    is_required: bool
    """One has to be."""
    several: bool
    """Several may be."""
    paths: tuple[str, ...]
    """Where they stand in the request."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of their arguments, by the names of functions and of arguments."""
        schemas = {}
        for function in self.functions:
            properties = (function.parameters or NO_PARAMETERS).get("properties")
            schemas[function.name] = properties if isinstance(properties, dict) else {}
        return schemas

    @property
    def custom(self) -> frozenset[str]:
        """The names of custom tools."""
        return frozenset(function.name for function in self.functions if isinstance(function, CustomFunction))

    @property
    def holds_calls(self) -> bool:
        """Calls have to be made, or to be as their schemas and grammars say."""
        return self.is_required or any(
            function.strict or (isinstance(function, CustomFunction) and function.grammar is not None)
            for function in self.functions
        )


def tooling(
    tools: list[Any] | None,
    tool_choice: Any,
    parallel_tool_calls: bool | None,
    functions: list[Any] | None,
    function_call: Any,
) -> Tooling | None:
    """None where nothing may be called. Raises Malformed."""
    if functions and tools:
        raise Malformed("'functions' is an older name of 'tools': send one of them", "functions")
    if functions is not None or function_call is not None:
        return _legacy(functions or [], function_call)
    known = _known_tools(tools or [], "tools")
    mode, names = _chosen(tool_choice, known)
    if mode == "none" or not known:
        return None
    shown = [_shown(function) for function in map(_declared, tools or ())]
    allowed = tuple(known[name] for name in names)
    # A named tool is called once.
    several = parallel_tool_calls is not False and not (
        mode == "required" and isinstance(tool_choice, dict) and tool_choice.get("type") in KINDS
    )
    places = {tool[tool["type"]]["name"]: f"tools[{i}].{tool['type']}" for i, tool in enumerate(tools or ())}
    return Tooling(shown, allowed, mode == "required", several, tuple(places[name] for name in names))


def _legacy(functions: list[Any], function_call: Any) -> Tooling | None:
    known = _checked([(function, f"functions[{i}]") for i, function in enumerate(functions)])
    match function_call:
        case None | "auto" | "none":
            names = list(known)
        case {"name": str(name)}:
            if name not in known:
                raise Malformed(f"Invalid 'function_call': there is no function '{_short(name)}'", "function_call")
            names = [name]
        case _:
            raise Malformed("Invalid 'function_call': it is none, auto or {'name': ...}", "function_call")
    if function_call == "none" or not known:
        return None
    allowed = tuple(known[name] for name in names)
    places = {function["name"]: f"functions[{i}]" for i, function in enumerate(functions)}
    paths = tuple(places[name] for name in names)
    return Tooling([_shown(function) for function in functions], allowed, isinstance(function_call, dict), False, paths)


def _known_tools(tools: Sequence[Any], path: str) -> dict[str, Function]:
    """By name."""
    found = []
    for i, tool in enumerate(tools):
        kind = converted(tool, Tool, f"{path}[{i}]")
        if kind.type not in KINDS:
            raise Malformed(
                f"Invalid '{path}[{i}].type': '{_short(kind.type)}' is not supported, 'function' and 'custom' are",
                f"{path}[{i}].type",
                "unsupported_value",
            )
        where = f"{path}[{i}].{kind.type}"
        if (kind.function if kind.type == "function" else kind.custom) is None:
            raise Malformed(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
        found.append((tool["function"] if kind.type == "function" else _as_function(kind), where))
    return _checked(found)


def _as_function(tool: Tool) -> CustomFunction:
    custom = tool.custom
    assert custom is not None
    return CustomFunction(custom.name, custom.description, custom.parameters, grammar=custom.grammar)


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """What a model is told of a tool that was checked."""
    if tool["type"] == "function":
        function: dict[str, Any] = tool["function"]
        return function
    custom = msgspec.convert(tool["custom"], Custom)
    return {"name": custom.name, "description": custom.description, "parameters": custom.parameters}


def _checked(found: Sequence[tuple[Any, str]]) -> dict[str, Function]:
    known: dict[str, Function] = {}
    for value, path in found:
        function = value if isinstance(value, Function) else converted(value, Function, path)
        if function.name in known:
            raise Malformed(f"Invalid '{path}.name': there are two tools '{function.name}'", f"{path}.name")
        if function.parameters is not None and function.parameters.get("type", "object") != "object":
            where = f"{path}.parameters"
            raise Malformed(f"Invalid '{where}': a function's schema has the type 'object'", where)
        known[function.name] = function
    return known


def _chosen(choice: Any, known: dict[str, Function]) -> tuple[Literal["none", "auto", "required"], list[str]]:
    """What ``tool_choice`` wants, and of which functions."""
    everything = list(known)
    if choice is None or choice == "auto":
        return "auto", everything
    if choice == "none":
        return "none", []
    if not isinstance(choice, str | dict) or (isinstance(choice, str) and choice != "required"):
        raise Malformed("Invalid 'tool_choice': it is none, auto, required or an object", "tool_choice")
    if not known:
        raise Malformed("'tool_choice' is allowed only when there are 'tools'", "tool_choice")
    if choice == "required":
        return "required", everything
    asked = converted(choice, Choice, "tool_choice")
    if (name := _named(asked, known, "tool_choice")) is not None:
        return "required", [name]
    if asked.type == "allowed_tools" and asked.allowed_tools is not None:
        names = []
        for i, tool in enumerate(asked.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{i}]"
            name = _named(converted(tool, Choice, path), known, path)
            if name is None:
                raise Malformed(f"Invalid '{path}': it names no function or custom tool", path, "unsupported_value")
            names.append(name)
        return asked.allowed_tools.mode, list(dict.fromkeys(names))
    if asked.type in (*KINDS, "allowed_tools"):
        path = f"tool_choice.{asked.type}"
        raise Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    raise Malformed(
        f"Invalid 'tool_choice.type': '{_short(asked.type)}' is not supported, 'function', 'custom' and"
        " 'allowed_tools' are",
        "tool_choice.type",
        "unsupported_value",
    )


def _named(choice: Choice, known: dict[str, Function], path: str) -> str | None:
    """The tool of its kind that is chosen; None: it chooses none."""
    named = choice.custom if choice.type == "custom" else choice.function
    if choice.type not in KINDS or named is None:
        return None
    name, path = named.name, f"{path}.{choice.type}.name"
    if name not in known or isinstance(known[name], CustomFunction) != (choice.type == "custom"):
        raise Malformed(f"Invalid '{path}': there is no tool '{_short(name)}' in 'tools'", path)
    return name


def _shown(function: dict[str, Any]) -> dict[str, Any]:
    """In the order of keys that templates were written for; ``strict`` is none of the model's business."""
    shown = {key: function[key] for key in ("name", "description") if function.get(key) is not None}
    shown["parameters"] = function.get("parameters") or NO_PARAMETERS
    others = {
        key: value for key, value in function.items() if key not in shown and key not in ("strict", "description")
    }
    return {"type": "function", "function": shown | others}


def _short(text: str) -> str:
    return text[:40].encode("unicode_escape").decode()
