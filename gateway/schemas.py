"""What is wrong with a schema that could be compiled, or would take long to: words that nobody knows, and parts that no
answer can ever end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policies.schemas import endless_part

MAX_NEEDED = 1 << 20
"""Characters or items that a schema may ask for at least; no answer has room for more."""
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
    return None


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
