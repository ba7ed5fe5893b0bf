"""What the calls of an answer are held to: schemas of functions, tried before any worker hears of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from hashlib import sha256
from typing import Any

import msgspec

from gateway import openai
from gateway.house import Gateway
from gateway.parsers.escaping import NotEscapable
from gateway.parsers.grammars import ANY_ARGUMENTS, Callable, Held, words_of
from gateway.parsers.tongue import Tongue
from gateway.responses.requests import ResponseRequest, tooling_of
from gateway.responses.tools import FunctionTool, callable_of, saying, tools_of
from policies import wire


async def held_of(
    gw: Gateway, tenant_id: str, tools: openai.Tooling, content: wire.Grammar | None, tongue: Tongue
) -> Held | None:
    """None where calls are the model's own affair. ``content``: what the text must be; calls may come in its place.
    Raises Malformed."""
    if content is None and not tools.holds_calls:
        return None
    functions = [await _callable(gw, tenant_id, tools, number, tongue) for number in range(len(tools.functions))]
    return Held(functions, tools.is_required, tools.several)


def grammar_of(
    gw: Gateway, tenant_id: str, held: Held | None, content: wire.Grammar | None, is_thinking: bool, tongue: Tongue
) -> wire.Grammar | None:
    """As ``Tongue.grammar`` makes it. That of all calls takes a millisecond for twenty functions, which an agent has
    in each of its turns."""
    if held is None:
        return tongue.grammar(None, content, is_thinking)
    digest = sha256(msgspec.json.encode((tenant_id, held, content, is_thinking))).digest()
    whole = gw.grammars.whole.find(digest, tongue)
    if whole is None:
        whole = tongue.grammar(held, content, is_thinking)
        if whole is not None:
            gw.grammars.whole.put(digest, tongue, whole, len(whole.source))
    return whole


async def strictly(gw: Gateway, tenant_id: str, call: ResponseRequest) -> ResponseRequest:
    """The same, whose functions all say whether they are strict. One that said nothing is so if a grammar can hold the
    model to its schema, and is refused for nothing: so does OpenAI with those of responses, but not of chats. Where an
    upstream may answer it is the upstream's to say. Raises Malformed."""
    tools = callable_of(tools_of(call.tools))
    silent = [tool for tool in tools if isinstance(tool, FunctionTool) and tool.strict is None]
    if not silent or gw.upstreams.of(call.model) is not None:
        return call
    # An agent has the same functions in each of its turns.
    asked = tenant_id, call.model, call.tools, call.tool_choice, call.parallel_tool_calls
    digest = sha256(msgspec.json.encode(asked)).digest()
    tongue = gw.dispatch.text(call.model).tongue
    can = gw.grammars.strict.find(digest, tongue)
    if can is None:
        can = await _strict(gw, tenant_id, call, silent, tongue)
        gw.grammars.strict.put(digest, tongue, can)
    return msgspec.structs.replace(call, tools=[saying(given, can) for given in call.tools or ()])


async def _strict(
    gw: Gateway, tenant_id: str, call: ResponseRequest, silent: Collection[FunctionTool], tongue: Tongue
) -> frozenset[str]:
    """The names of those that can be."""
    can = set[str]()
    for tool in silent:
        if await _holds(gw, tenant_id, _schema(tool.parameters or openai.NO_PARAMETERS, True)):
            can.add(tool.name)
    return frozenset(can) if not can or await _hold_together(gw, tenant_id, call, can, tongue) else frozenset()


async def _hold_together(
    gw: Gateway, tenant_id: str, call: ResponseRequest, names: Collection[str], tongue: Tongue
) -> bool:
    """Whether one grammar can hold all calls when these functions are strict. The model's own tokens, which are not
    known here, stand in it as they are spelled."""
    tools = tooling_of(call)
    if tools is None:
        return True
    functions = [
        msgspec.structs.replace(function, strict=True) if function.name in names else function
        for function in tools.functions
    ]
    held = await held_of(gw, tenant_id, tools._replace(functions=tuple(functions)), None, tongue)
    spelled = tongue._replace(words=words_of(tuple(tongue.words.spelled), {}))
    return held is None or await _holds(gw, tenant_id, spelled.grammar(held, None, False))


async def _holds(gw: Gateway, tenant_id: str, grammar: wire.Grammar | None) -> bool:
    try:
        await gw.grammars.checked(None if grammar is None else openai.AskedGrammar(grammar, "tools"), tenant_id)
    except openai.Malformed:
        return False
    return True


def _schema(parameters: dict[str, Any], is_strict: bool) -> wire.Grammar:
    return wire.Grammar("json_schema", json.dumps(parameters), is_strict)


async def _callable(gw: Gateway, tenant_id: str, tools: openai.Tooling, number: int, tongue: Tongue) -> Callable:
    """A function whose schema can be held to. One that cannot is refused where it is strict, and else held to nothing
    but that its arguments are an object."""
    function = tools.functions[number]
    if isinstance(function, openai.CustomFunction) and function.grammar is not None:
        path = f"{tools.paths[number]}.format.grammar.definition"
        text = await _text(gw, tenant_id, function.grammar, path, tongue)
        return Callable(function.name, openai.NO_PARAMETERS, False, text)
    parameters, is_strict = function.parameters or openai.NO_PARAMETERS, bool(function.strict)
    try:
        await gw.grammars.checked(
            openai.AskedGrammar(_schema(parameters, is_strict), f"{tools.paths[number]}.parameters"), tenant_id
        )
    except openai.Malformed:
        if is_strict:
            raise
        parameters = ANY_ARGUMENTS
    return Callable(function.name, parameters, is_strict)


async def _text(gw: Gateway, tenant_id: str, grammar: wire.Grammar, path: str, tongue: Tongue) -> wire.Grammar:
    """What a custom tool is given, if the model's way of writing calls can hold it. Raises Malformed."""
    found = await gw.grammars.checked(openai.AskedGrammar(grammar, path), tenant_id)
    assert found is not None
    try:
        rules = tongue.calls.text(tongue.words.spelled, "text", found)
    except NotEscapable as error:
        raise openai.Malformed(
            f"Invalid '{path}': this model writes it inside of a JSON string, where {error}", path, "unsupported_value"
        ) from None
    whole = wire.Grammar("lark", "\n".join(["start: text", *rules]) + "\n", is_composed=True)
    await gw.grammars.checked(openai.AskedGrammar(whole, path), tenant_id)
    return found
