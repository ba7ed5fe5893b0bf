"""What is wrong with a schema that could be compiled, or would take long to: words that nobody knows, and parts that no
answer can ever end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from policies.schemas import endless_part

MAX_NEEDED = 1 << 20
"""Characters or items that a schema may ask for at least; no answer has room for more."""
MAX_MULTIPLE = 1 << 17
"""The common multiple of all that a schema's numbers must be multiples of: llguidance's automaton has a state for each
remainder, in half a kilobyte, and none of its bounds is about these. Round ones have few."""
_ROUND = 100
"""Numbers below, with any number of zeros behind them."""
_MAX_DIGITS = 15
"""Of such a number; llguidance refuses longer ones."""
KEYWORDS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$ref",
    "$schema", "$vocabulary", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "dependencies",
    "dependentRequired", "dependentSchemas", "deprecated", "description", "else", "enum", "examples",
    "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems", "maxLength",
    "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "readOnly", "required",
    "then", "title", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "writeOnly",
    # What OpenAPI and its tools write beside, of which no value depends.
    "discriminator", "example", "externalDocs", "xml",
})  # fmt: skip
"""Of JSON Schema, 2020-12 and before. Which of them can be kept to, llguidance says."""


_Path = tuple["_Path", str] | None
"""Of a part, and its last step: written out for each of many parts a long name would be there as often."""


class Fault(Exception):
    """What is wrong, and the path of the part below the source."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def fault_of(schema: dict[str, Any], is_strict: bool) -> Fault | None:
    """None: it may be compiled. ``is_strict``: no word of it may be passed over."""
    endless = endless_part(schema)
    left: list[tuple[_Path, dict[str, Any]]] = [(None, schema)]
    while left:
        path, node = left.pop()
        if node is endless:
            return Fault("it leads to itself, and no value of it ever ends", f"{_written(path)}.$ref")
        for word, value in node.items() if is_strict else ():
            if word not in KEYWORDS and not word.startswith("x-"):
                return Fault("it is no keyword of JSON Schema", f"{_written(path)}.{word[:64]}")
            if word in ("minItems", "minLength") and isinstance(value, int) and value > MAX_NEEDED:
                return Fault(f"no answer is that long: {MAX_NEEDED} are allowed", f"{_written(path)}.{word}")
        left += [((path, below), child) for _, below, child in parts_of(node)]
    return multiples_fault(schema)


def multiples_fault(schema: Any) -> Fault | None:
    """None: its automaton has a bound. References may lead anywhere in it, so all of it counts."""
    common = 1
    for path, each in _multiples(schema):
        # Places behind the point add no states.
        common = math.lcm(common, each.numerator)
        if common > MAX_MULTIPLE and _unrounded(common) >= _ROUND:
            return Fault(f"what numbers must be multiples of comes to more than {MAX_MULTIPLE} in all", _written(path))
    return None


def schemas_in(source: str) -> Iterator[Any]:
    """Those that a grammar in Lark has in it, as far as they can be read."""
    # Of long numbers Python reads no integers.
    decoder = json.JSONDecoder(parse_int=float)
    for found in re.finditer(r"%json\s*", source):
        try:
            yield decoder.raw_decode(source, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _multiples(schema: Any) -> Iterator[tuple[_Path, Fraction]]:
    """What numbers must be multiples of, and the path of each."""
    left: list[tuple[_Path, Any]] = [(None, schema)]
    while left:
        path, node = left.pop()
        if isinstance(node, dict):
            value = node.get("multipleOf")
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 < abs(value) < 10**_MAX_DIGITS:
                yield (path, ".multipleOf"), abs(Fraction(repr(value)))
            left += [((path, f".{word}"), child) for word, child in node.items()]
        elif isinstance(node, list):
            left += [((path, f"[{place}]"), child) for place, child in enumerate(node)]


def _unrounded(number: int) -> int:
    """Without the zeros at its end."""
    while number % 10 == 0:
        number //= 10
    return number


def _written(path: _Path) -> str:
    steps = []
    while path is not None:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = (
    "items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Schemas inside of a schema: the step of a JSON pointer to each, and the same as a path."""
    for word in _MAPS:
        inner = schema.get(word)
        for name, child in inner.items() if isinstance(inner, dict) else ():
            if isinstance(child, dict):
                yield f"/{word}/{name.replace('~', '~0').replace('/', '~1')}", f".{word}.{name}", child
    for word in _LISTS:
        inner = schema.get(word)
        for place, child in enumerate(inner) if isinstance(inner, list) else ():
            if isinstance(child, dict):
                yield f"/{word}/{place}", f".{word}[{place}]", child
    for word in _ONES:
        child = schema.get(word)
        if isinstance(child, dict):
            yield f"/{word}", f".{word}", child
