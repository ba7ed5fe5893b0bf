"""What the calls of an answer are held to: schemas of functions, tried before any worker hears of them."""

from __future__ import annotations

import json

from gateway import openai
from gateway.house import Gateway
from gateway.parsers.escaping import NotEscapable
from gateway.parsers.grammars import ANY_ARGUMENTS, Callable, Held
from gateway.parsers.tongue import Tongue
from policies import wire


async def held_of(gw: Gateway, tools: openai.Tooling, content: wire.Grammar | None, tongue: Tongue) -> Held | None:
    """None where calls are the model's own affair. ``content``: what the text must be; calls may come in its place.
    Raises Malformed."""
    if content is None and not tools.holds_calls:
        return None
    functions = [await _callable(gw, tools, number, tongue) for number in range(len(tools.functions))]
    return Held(functions, tools.is_required, tools.several)


async def _callable(gw: Gateway, tools: openai.Tooling, number: int, tongue: Tongue) -> Callable:
    """A function whose schema can be held to. One that cannot is refused where it is strict, and else held to nothing
    but that its arguments are an object."""
    function = tools.functions[number]
    if isinstance(function, openai.CustomFunction) and function.grammar is not None:
        path = f"{tools.paths[number]}.format.grammar.definition"
        text = await _text(gw, function.grammar, path, tongue)
        return Callable(function.name, openai.NO_PARAMETERS, False, text)
    parameters, is_strict = function.parameters or openai.NO_PARAMETERS, bool(function.strict)
    schema = wire.Grammar("json_schema", json.dumps(parameters), is_strict)
    try:
        await gw.grammars.checked(openai.AskedGrammar(schema, f"{tools.paths[number]}.parameters"))
    except openai.Malformed:
        if is_strict:
            raise
        parameters = ANY_ARGUMENTS
    return Callable(function.name, parameters, is_strict)


async def _text(gw: Gateway, grammar: wire.Grammar, path: str, tongue: Tongue) -> wire.Grammar:
    """What a custom tool is given, if the model's way of writing calls can hold it. Raises Malformed."""
    found = await gw.grammars.checked(openai.AskedGrammar(grammar, path))
    assert found is not None
    try:
        rules = tongue.calls.text(tongue.words.spelled, "text", found)
    except NotEscapable as error:
        raise openai.Malformed(
            f"Invalid '{path}': this model writes it inside of a JSON string, where {error}", path, "unsupported_value"
        ) from None
    whole = wire.Grammar("lark", "\n".join(["start: text", *rules]) + "\n")
    await gw.grammars.checked(openai.AskedGrammar(whole, path))
    return found
