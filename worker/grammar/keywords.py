"""What a schema says of values in the words that worker.grammar.outline reads."""

from __future__ import annotations

import json
from typing import Any

from worker.grammar.states import OPEN_OBJECT

QUOTE, OPEN_LIST = b'"['
NOTES = frozenset({"$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples"})
_OF_LISTS = frozenset({"items", "minItems", "maxItems"})
_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_READ = _OF_LISTS | _OF_TEXTS | _OF_OBJECTS | OF_NUMBERS | {"type"}
TYPES: dict[int, tuple[str, ...]] = {
    QUOTE: ("string",),
    OPEN_LIST: ("array",),
    OPEN_OBJECT: ("object",),
    ord("n"): ("null",),
    **dict.fromkeys(b"tf", ("boolean",)),
    **dict.fromkeys(b"-0123456789", ("number", "integer")),
}
"""By the first byte of a value."""


def is_read(words: dict[str, Any]) -> bool:
    if words.keys() == {"anyOf"}:
        return isinstance(words["anyOf"], list)
    if words.keys() & {"enum", "const"}:
        return words.keys() <= {"enum", "const", "type"}
    counts = [words[word] for word in ("minItems", "maxItems", "minLength", "maxLength") if word in words]
    return (
        words.keys() <= _READ
        and all(isinstance(count, int) for count in counts)
        and isinstance(words.get("properties", {}), dict)
        and isinstance(words.get("pattern", ""), str)
    )


def may_begin(words: dict[str, Any], byte: int) -> bool:
    """A value of this schema, with this byte."""
    if "type" in words:
        return any(name in types(words) for name in TYPES.get(byte, ()))
    values = words["enum"] if "enum" in words else [words["const"]] if "const" in words else None
    return values is None or any(json.dumps(value).encode()[0] == byte for value in values)


def types(words: dict[str, Any]) -> list[str]:
    """That values may be of."""
    asked = words.get("type", ["number"])
    return asked if isinstance(asked, list) else [asked]
