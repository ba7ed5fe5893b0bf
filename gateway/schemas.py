"""What is wrong with a schema that could be compiled, or would take long to: words that nobody knows, and parts that no
answer can ever end."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, product, zip_longest
from typing import Any

from policies.grammar import children_of, list_in, map_in, texts_left_out
from policies.schemas import endless_part, referred
from policies.widths import width_of

MAX_NEEDED = 1 << 20
"""Characters or items that a schema may ask for at least; no answer has room for more."""
MAX_MULTIPLE = 1 << 17
"""The common multiple of all that a schema's numbers must be multiples of: llguidance's automaton has a state for each
remainder, in half a kilobyte, and none of its bounds is about these. Round ones have few."""
MAX_JOINED = 10
"""Patterns that one text must match together. llguidance makes one automaton of them, and its time more than doubles
with each: 19 took a second, and nothing stops a thread."""
MAX_LED = 256
"""Choices that a choice leads on to at one place of a text, each as often as one of them offers it. For every byte that
may come llguidance looks at all of them at once, in a time that grows with the square of their number and more: 100
definitions that are each a choice between all 100 had one mask take five seconds, 150 of them a minute and a half."""
MAX_WIDTH = 2000
"""Things that may be meant at one place of a text, see policies.widths: llguidance has as many in a row at most, beside
what else is there, and finds that out in a time that grows with the square of their number; 200 definitions that are
each a list of any of them have one mask take five seconds."""
_MAX_LOOKS = 1 << 18
"""At parts, for patterns that are joined, and for choices that lead on to others."""
_MAX_CASES = 64
"""Of what a value may be, by one of each of several anyOf."""
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
    """None: what numbers must be multiples of, and what texts must match, has automata with a bound, and what may be
    meant at one place of a text has one, too."""
    return multiples_fault(schema) or joined_fault(schema) or choices_fault(schema) or width_fault(schema)


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
    """None: no text has to match too many patterns at once. Parts are joined that hold of one value, beside each other
    or by allOf and references, with one of each anyOf; and so is what they say of one property, or of one item."""
    if len(_patterns_in(schema)) <= MAX_JOINED:
        return None  # as nearly always
    looks = _Looks()
    left: list[tuple[_Path, list[Any]]] = [(None, [schema])]
    known = set[frozenset[int]]()
    try:
        while left:
            path, group = left.pop()
            together = frozenset(map(id, group))
            if together in known:
                continue
            known.add(together)
            for parts in _cases(schema, group, looks):
                if len({part["pattern"] for part in parts if isinstance(part.get("pattern"), str)}) > MAX_JOINED:
                    return Fault(f"parts that hold together may have {MAX_JOINED} patterns in all", _written(path))
                left += [((path, step), inner) for step, inner in _inner(parts, looks) if inner]
    except _TooMany:
        return Fault(f"too many parts hold together for a schema that has more than {MAX_JOINED} patterns")
    return None


def choices_fault(schema: Any) -> Fault | None:
    """None: no choice leads on to too many others before anything of a value has come."""
    looks = _Looks()
    left: list[tuple[_Path, Any]] = [(None, schema)]
    ways: dict[int, list[dict[str, Any]]] = {}
    try:
        while left:
            path, node = left.pop()
            if not isinstance(node, dict):
                continue
            num, known, due = 0, {id(node)}, [node]
            while due and num <= MAX_LED:
                part = due.pop()
                following = ways.get(id(part))
                if following is None:
                    following = ways[id(part)] = [each for each in _offered(schema, part, looks) if _is_choice(each)]
                looks.take(len(following))
                num += len(following)
                new = {id(each): each for each in following if id(each) not in known}
                known |= new.keys()
                due += new.values()
            if num > MAX_LED:
                return Fault(f"choices lead on to more than {MAX_LED} others at one place", _written(path))
            left += [((path, below), child) for _, below, child in parts_of(node)]
    except _TooMany:
        return Fault("it has too many choices that lead on to others")
    return None


def width_fault(schema: Any) -> Fault | None:
    """None: few things may be meant at one place."""
    width = width_of(schema)
    if width.num <= MAX_WIDTH:
        return None
    at = f"at {width.path[:200]}" if width.path else "at once"
    return Fault(f"{width.num} choices and properties may be meant {at}, and {MAX_WIDTH} are allowed")


def _is_choice(part: dict[str, Any]) -> bool:
    return any(list_in(part, word) for word in _CHOICES)


def _offered(root: Any, part: dict[str, Any], looks: _Looks) -> Iterator[dict[str, Any]]:
    """Parts that a value of this one may be, where a reference stands for what it leads to. Raises _TooMany."""
    offered = [each for word in _CHOICES for each in list_in(part, word)]
    for each in [*offered, {"$ref": part["$ref"]}] if "$ref" in part else offered:
        seen = set[int]()
        while isinstance(each, dict) and id(each) not in seen and not _is_choice(each):
            seen.add(id(each))
            if "$ref" not in each:
                break
            looks.take()
            try:
                each = referred(root, each["$ref"])
            except LookupError:
                break
        if isinstance(each, dict):
            yield each


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


class _TooMany(Exception):
    pass


class _Looks:
    """At parts of a schema."""

    def __init__(self) -> None:
        self._num_left = _MAX_LOOKS

    def take(self, num: int = 1) -> None:
        """Raises _TooMany."""
        self._num_left -= num
        if self._num_left < 0:
            raise _TooMany


def _patterns_in(schema: Any) -> set[str]:
    found, left = set[str](), [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict) and isinstance(each.get("pattern"), str):
            found.add(each["pattern"])
        left += children_of(each)
    return found


def _cases(root: Any, group: list[Any], looks: _Looks) -> Iterator[list[dict[str, Any]]]:
    """The parts that hold of a value of which all of these hold, with one of each anyOf; with all, where these are
    many. Raises _TooMany."""
    left: list[tuple[list[Any], list[dict[str, Any]]]] = [(group, [])]
    while left:
        more, before = left.pop()
        todo, parts, seen = list(more), list(before), set(map(id, before))
        choices: list[list[Any]] = []
        while todo:
            looks.take()
            part = todo.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            parts.append(part)
            todo += list_in(part, "allOf")
            # llguidance finds what is named otherwise, too.
            with contextlib.suppress(LookupError):
                todo.append(referred(root, part.get("$ref")))
            choices += filter(None, (list_in(part, word) for word in ("anyOf", "oneOf")))
        if not choices:
            yield parts
        elif math.prod(map(len, choices)) > _MAX_CASES:
            left.append((list(chain.from_iterable(choices)), parts))
        else:
            left += [(list(chosen), parts) for chosen in product(*choices)]


def _inner(parts: list[dict[str, Any]], looks: _Looks) -> Iterator[tuple[str, list[Any]]]:
    """By step: what parts that hold together say of a property, of an item, of names. Raises _TooMany."""
    names = dict.fromkeys(name for part in parts for name in map_in(part, "properties"))
    looks.take(len(names) * len(parts))
    for name in names:
        yield f".properties.{name}", [child for part in parts for child in _of_property(part, name)]
    for name in dict.fromkeys(name for part in parts for name in map_in(part, "patternProperties")):
        yield f".patternProperties.{name}", [map_in(part, "patternProperties").get(name) for part in parts]
    rows = [list_in(part, "prefixItems") or list_in(part, "items") for part in parts]
    most = max(map(len, rows), default=0)
    looks.take(most * len(parts))
    rests = [each for part in parts if isinstance(each := part.get("items", part.get("additionalItems")), dict)]
    for place in range(most):
        yield f".prefixItems[{place}]", [row[place] for row in rows if place < len(row)] + rests
    yield ".items", rests
    for word in ("additionalProperties", "additionalItems", "contains", "propertyNames"):
        yield f".{word}", [part[word] for part in parts if isinstance(part.get(word), dict)]


def _of_property(part: dict[str, Any], name: str) -> Iterator[Any]:
    """What it says of a property of this name; of patterns of names each may be one of it."""
    own = map_in(part, "properties")
    if name in own:
        yield own[name]
    else:
        yield from map_in(part, "patternProperties").values()
        yield part.get("additionalProperties")


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


_CHOICES = ("anyOf", "oneOf", "allOf")
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
