"""What is wrong with a schema that could be compiled, or would take long to: words that nobody knows, and parts that no
answer can ever end."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from policies.grammar import children_of, texts_left_out
from policies.schemas import endless_part, referred

MAX_NEEDED = 1 << 20
"""Characters or items that a schema may ask for at least; no answer has room for more."""
MAX_MULTIPLE = 1 << 17
"""The common multiple of all that a schema's numbers must be multiples of: llguidance's automaton has a state for each
remainder, in half a kilobyte, and none of its bounds is about these. Round ones have few."""
MAX_JOINED = 10
"""Patterns that one text must match together. llguidance makes one automaton of them, and its time more than doubles
with each: 19 took a second, 40 would have taken years, and nothing stops a thread."""
_MAX_LOOKS = 1 << 18
"""At parts, for patterns."""
_DEFINITION = re.compile(r"^[ \t]*[?!]*(_*[A-Za-z]\w*)(?:\[[^\]]*\])?[-.\d \t]*:", re.MULTILINE)
"""In Lark."""
_NAME = re.compile(r"\w+")
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
_JOINING = frozenset(("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf"))
_SAYING_NOTHING = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "discriminator", "example", "examples", "readOnly", "title", "type", "writeOnly",
})  # fmt: skip
"""Of texts, beside what joins."""


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
    return unbounded_fault(schema)


def unbounded_fault(schema: Any) -> Fault | None:
    """None: what numbers must be multiples of, and what texts must match, has automata with a bound."""
    return multiples_fault(schema) or joined_fault(schema)


def multiples_fault(schema: Any) -> Fault | None:
    """None: its automaton has a bound. References may lead anywhere in it, so all of it counts."""
    common = 1
    for path, each in _multiples(schema):
        # Places behind the point add no states.
        common = math.lcm(common, each.numerator)
        if common > MAX_MULTIPLE and _unrounded(common) >= _ROUND:
            return Fault(f"what numbers must be multiples of comes to more than {MAX_MULTIPLE} in all", _written(path))
    return None


def joined_fault(schema: Any) -> Fault | None:
    """None: no text has to match too many patterns at once, as parts are joined that hold of the same value. What is
    joined inside of such parts is not looked for: all of their patterns count."""
    if _num_patterns(schema, schema, [_MAX_LOOKS]) <= MAX_JOINED:
        return None  # as nearly always
    num_left = [_MAX_LOOKS]
    left: list[tuple[_Path, Any]] = [(None, schema)]
    while left:
        path, node = left.pop()
        if isinstance(node, dict):
            if _joins(node) and _num_patterns(schema, node, num_left) > MAX_JOINED:
                return Fault(f"parts that hold together may have {MAX_JOINED} patterns in all", _written(path))
            left += [((path, f".{word}"), child) for word, child in node.items()]
        elif isinstance(node, list):
            left += [((path, f"[{place}]"), child) for place, child in enumerate(node)]
    return None


def conjunctions_fault(lark: str) -> Fault | None:
    """As ``joined_fault``, of a grammar in Lark and its ``&``."""
    text = texts_left_out(lark)
    if text.count("&") < MAX_JOINED:
        return None  # as nearly always
    begins = list(_DEFINITION.finditer(text))
    names, own = {begin[1] for begin in begins}, dict[str, int]()
    used: dict[str, list[str]] = {}
    for begin, after in zip_longest(begins, begins[1:]):
        name, body = begin[1], text[begin.end() : after.start() if after else len(text)]
        own[name] = own.get(name, 0) + body.count("&")
        used.setdefault(name, []).extend(filter(names.__contains__, _NAME.findall(body)))
    num: dict[str, int] = {}
    left = [(name, False) for name in names]
    while left:
        name, is_done = left.pop()
        if is_done:
            num[name] += sum([num[each] for each in used[name]])
            if num[name] >= MAX_JOINED:
                return Fault(f"'{name[:64]}' may have less than {MAX_JOINED} '&', with those of what it is made of")
        elif name not in num:
            num[name] = own[name]
            if num[name] or not name.lstrip("_")[0].islower():  # a terminal is made of others, a rule is not
                left += [(name, True), *((each, False) for each in used[name])]
    return None


def _joins(node: dict[str, Any]) -> bool:
    """Several of its parts hold of one value."""
    if not node.keys() & _JOINING:
        return False
    several = node.get("allOf")
    return (isinstance(several, list) and len(several) > 1) or len(node.keys() - _SAYING_NOTHING) > 1


def _num_patterns(root: Any, node: Any, num_left: list[int]) -> int:
    """Different ones below it, and below what it refers to; more than are allowed where that is not found out in so
    many looks."""
    found, seen, left = set[str](), set[str](), [node]
    while left and len(found) <= MAX_JOINED:
        num_left[0] -= 1
        if num_left[0] < 0:
            return MAX_JOINED + 1
        each = left.pop()
        if isinstance(each, dict):
            pattern, reference = each.get("pattern"), each.get("$ref")
            if isinstance(pattern, str):
                found.add(pattern)
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                # llguidance finds what is named otherwise, too.
                with contextlib.suppress(LookupError):
                    left.append(referred(root, reference))
        left += children_of(each)
    return len(found)


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
