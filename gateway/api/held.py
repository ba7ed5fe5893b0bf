"""What the calls of an answer are held to: schemas of functions, tried before any worker hears of them."""

from __future__ import annotations

import json

from gateway import openai
from gateway.house import Gateway
from gateway.parsers.grammars import ANY_ARGUMENTS, Callable, Held
from policies import wire


async def held_of(gw: Gateway, tools: openai.Tooling, content: wire.Grammar | None) -> Held | None:
    """None where calls are the model's own affair. ``content``: what the text must be; calls may come in its place.
    Raises Malformed."""
    if content is None and not tools.holds_calls:
        return None
    functions = [await _callable(gw, tools, number) for number in range(len(tools.functions))]
    return Held(functions, tools.is_required, tools.several)


async def _callable(gw: Gateway, tools: openai.Tooling, number: int) -> Callable:
    """A function whose schema can be held to. One that cannot is refused where it is strict, and else held to nothing
    but that its arguments are an object."""
    function = tools.functions[number]
    parameters, is_strict = function.parameters or openai.NO_PARAMETERS, bool(function.strict)
    schema = wire.Grammar("json_schema", json.dumps(parameters), is_strict)
    try:
        await gw.grammars.checked(openai.AskedGrammar(schema, f"{tools.paths[number]}.parameters"))
    except openai.Malformed:
        if is_strict:
            raise
        parameters = ANY_ARGUMENTS
    return Callable(function.name, parameters, is_strict)
