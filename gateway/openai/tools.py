"""Tools in a chat request: what may be called, whether it has to be, and how the older ``functions`` say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.openai.decoding import converted
from gateway.openai.failures import Malformed

Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a function that says none."""


class Function(msgspec.Struct, frozen=True):
    """What can be called. ``parameters`` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """``type``: only functions are called here."""

    type: str
    function: Function | None = None


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
    def holds_calls(self) -> bool:
        """Calls have to be made, or to be as their schemas say."""
        return self.is_required or any(function.strict for function in self.functions)


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
    known = _functions(tools or [], "tools")
    mode, names = _chosen(tool_choice, known)
    if mode == "none" or not known:
        return None
    shown = [_shown(tool["function"]) for tool in tools or ()]
    allowed = tuple(known[name] for name in names)
    # A named tool is called once.
    several = parallel_tool_calls is not False and not (
        mode == "required" and isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
    )
    places = {tool["function"]["name"]: f"tools[{i}].function" for i, tool in enumerate(tools or ())}
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


def _functions(tools: Sequence[Any], path: str) -> dict[str, Function]:
    """By name."""
    found = []
    for i, tool in enumerate(tools):
        kind = converted(tool, Tool, f"{path}[{i}]")
        if kind.type != "function":
            raise Malformed(
                f"Invalid '{path}[{i}].type': '{_short(kind.type)}' is not supported, only 'function' is",
                f"{path}[{i}].type",
                "unsupported_value",
            )
        if kind.function is None:
            where = f"{path}[{i}].function"
            raise Malformed(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
        found.append((tool["function"], f"{path}[{i}].function"))
    return _checked(found)


def _checked(found: Sequence[tuple[Any, str]]) -> dict[str, Function]:
    known: dict[str, Function] = {}
    for value, path in found:
        function = converted(value, Function, path)
        if function.name in known:
            raise Malformed(f"Invalid '{path}.name': there are two functions '{function.name}'", f"{path}.name")
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
    if asked.type == "function" and asked.function is not None:
        return "required", [_known(asked.function.name, known, "tool_choice.function.name")]
    if asked.type == "allowed_tools" and asked.allowed_tools is not None:
        names = []
        for i, tool in enumerate(asked.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{i}]"
            each = converted(tool, Choice, path)
            if each.type != "function" or each.function is None:
                raise Malformed(f"Invalid '{path}': only functions are called here", path, "unsupported_value")
            names.append(_known(each.function.name, known, f"{path}.function.name"))
        return asked.allowed_tools.mode, list(dict.fromkeys(names))
    if asked.type in ("function", "allowed_tools"):
        path = f"tool_choice.{asked.type}"
        raise Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    raise Malformed(
        f"Invalid 'tool_choice.type': '{_short(asked.type)}' is not supported, 'function' and 'allowed_tools' are",
        "tool_choice.type",
        "unsupported_value",
    )


def _known(name: str, known: dict[str, Function], path: str) -> str:
    if name not in known:
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
