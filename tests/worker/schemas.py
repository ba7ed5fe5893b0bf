"""Schemas by chance: nested, with choices, enumerations, expressions, recursion, keys of any script and bounds."""

from __future__ import annotations

import random
from typing import Any

KEYS = ("a", "name", "größe", "ключ", "東京", "x-y", "two words", "🙂", 'q"uote', "back\\slash", "é/~1", "z" * 20)
PATTERNS = (
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$", "^(yes|no|perhaps)$", "^[A-F0-9]+$", "^x", r"^[a-z]+@[a-z]+\.(com|org)$", "[0-9]$",
)  # fmt: skip
FORMATS = ("date", "date-time", "uuid", "ipv4")
VALUES = ("", "one", "naïve", "東", "a\nb", 'say "no"', 0, -7, 3.25, True, None, [], {"k": [1]})


def a_schema(chance: random.Random) -> dict[str, Any]:
    """Of a small document, as a rule."""
    names = [f"d{place}" for place in range(chance.randrange(3))]
    schema = _any(chance, 3, names)
    if names:
        schema["$defs"] = {name: _definition(chance, names) for name in names}
    return schema


def _definition(chance: random.Random, names: list[str]) -> dict[str, Any]:
    """It may refer to itself, but need not go on for ever."""
    inner = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{chance.choice(names)}"}]}
    if chance.random() < 0.5:
        return {"type": "array", "items": inner, "maxItems": 3}
    return {
        "type": "object",
        "properties": {"value": _scalar(chance), "next": inner},
        "required": ["value", "next"],
        "additionalProperties": False,
    }


def _any(chance: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kind = chance.random()
    if depth == 0 or kind < 0.25:
        return _scalar(chance)
    if names and kind < 0.35:
        return {"$ref": f"#/$defs/{chance.choice(names)}"}
    if kind < 0.5:
        return {"anyOf": [_any(chance, depth - 1, names) for _ in range(chance.randint(2, 3))]}
    if kind < 0.65:
        few = chance.randrange(3)
        array: dict[str, Any] = {"type": "array", "items": _any(chance, depth - 1, names)}
        if few:
            array |= {"minItems": few, "maxItems": few + chance.randrange(3)}
        return array
    keys = chance.sample(KEYS, chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _any(chance, depth - 1, names) for key in keys},
        "required": [key for key in keys if chance.random() < 0.6],
    }
    others = chance.random()
    if others < 0.6:
        schema["additionalProperties"] = False
    elif others < 0.8:
        schema["additionalProperties"] = _scalar(chance)
    return schema


def _scalar(chance: random.Random) -> dict[str, Any]:
    match chance.randrange(9):
        case 0:
            low = chance.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.choice((0, 3, 1000))}
        case 1:
            return {"type": "number", "exclusiveMinimum": chance.randint(-3, 3), "maximum": 1e4}
        case 2:
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case 3:
            return {"enum": chance.sample(VALUES, chance.randint(1, 4))}
        case 4:
            return {"const": chance.choice(VALUES)}
        case 5:
            few = chance.randrange(4)
            return {"type": "string", "minLength": few, "maxLength": few + chance.randrange(6)}
        case 6:
            return {"type": "string", "format": chance.choice(FORMATS)}
        case 7:
            return {"type": ["boolean", "null"]}
        case _:
            return {"type": chance.choice(("string", "integer", "number", "boolean"))}
