"""How far an answer can be from its end, wherever it is: so that nobody looks for the end before it is near.

An answer that is being written is in some parts of its schema, one inside of the other, and each is ended by what is
still missing of it. What one part can miss at most follows from the schema alone; where parts cannot be inside of
themselves, so does what all of them can, and else it grows with the levels that are open. Everything is counted in
bytes of JSON, each of them a token at worst, and rather too much than too little. Of schemas that say what is not read
here nothing is known.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from policies import wire
from policies.expressions import FORMATS, Expression, NotRead

MAX_PARTS = 5000
MAX_LOOKS = 50_000
MAX_PATTERNS = 64
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_SAYS_NOTHING = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "x-guidance",
})  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"prefixItems", "items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
}
_LEAST = re.compile(r"\{([0-9]{1,9})[,}]")
"""How often at least something comes in an expression."""
_ENDLESS = 1 << 40
_NUMBER, _WORD, _FORMAT, _QUOTES, _ESCAPE = 48, 5, 96, 2, 16
"""Bytes of a number, of a word, of a date or address, of a string's ends, and of what an escape has begun."""


class _NotKnown(Exception):
    """This schema says more than is read here."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one schema."""

    total: int | None
    """Bytes from anywhere to the end; None: it depends on how deep it is in itself."""
    level: int
    """The same of one level of an answer."""

    def of(self, num_levels: int) -> int:
        """With so many open."""
        return self.total if self.total is not None else self.level * (num_levels + 2)


@dataclass(slots=True, eq=False)
class _Part:
    """A place in a schema."""

    fixed: int = 0
    """Bytes that it has in any case."""
    begun: int = 0
    """Bytes that it may miss beside, in the middle of something."""
    needed: list[tuple[int, _Part]] = field(default_factory=list)
    """How often it has which parts."""
    possible: list[_Part] = field(default_factory=list)
    """That may come in it."""
    one_of: list[_Part] = field(default_factory=list)
    """If any: it is one of these."""
    shortest: float = math.inf
    """Bytes of the shortest value, as far as is known."""
    refers: dict[str, Any] | None = None
    """The schema, where it is a reference."""

    def inner(self) -> Iterator[_Part]:
        yield from self.one_of
        yield from self.possible
        yield from (part for _, part in self.needed)

    def look(self) -> float:
        """Bytes of the shortest one, as far as is known of its parts."""
        if self.one_of:
            return min(part.shortest for part in self.one_of)
        return self.fixed + sum(num * part.shortest for num, part in self.needed if num)

    @property
    def missing(self) -> float:
        """Bytes that it may miss at most, without what is under way inside of it."""
        if self.one_of:
            return 0
        likely = [part.shortest for part in self.possible if part.shortest < math.inf]
        return self.look() + self.begun + max(likely, default=0)


def bound(grammar: wire.Grammar) -> Bound | None:
    """None: it is not known."""
    match grammar.kind:
        case "json_schema":
            return bound_of(json.loads(grammar.source))
        case "json_object":
            return bound_of({"type": "object"})
        case "lark":
            return _of_lark(grammar.source)
        case _:
            return None


def _of_lark(source: str) -> Bound | None:
    """Of rules some of which are schemas: each of them, one after the other, and all other words, as often as they
    must come."""
    total = 0
    for line in source.splitlines():
        before, mark, schema = line.partition("%json ")
        times = 1
        for least in _LEAST.findall(before):
            times = min(times * max(1, int(least)), _ENDLESS)
        total += len(before.encode()) * times
        if "%lark" in before:
            return None
        if mark:
            try:
                part = bound_of(json.loads(schema))
            except ValueError:
                return None
            if part is None or part.total is None:
                return None
            total += part.total
    return Bound(total, total)


def bound_of(schema: Any) -> Bound | None:
    """None: it is not known."""
    parts = _measured(schema, True)
    if parts is None:
        return None
    level = max(part.missing for part in parts)
    total = _total(parts[0])
    if math.inf in (parts[0].shortest, level, total):
        return None
    return Bound(None if total is None else int(total), int(level))


def endless_part(schema: Any) -> dict[str, Any] | None:
    """A part that refers to itself so that no value of it ever ends, and that no value goes without; None: there is
    none, as far as is known."""
    parts = _measured(schema, False)
    if parts is None or parts[0].shortest < math.inf:
        return None
    endless: dict[str, Any] | None = None
    left, seen = [parts[0]], set[int]()
    while left:
        part = left.pop()
        seen.add(id(part))
        endless = part.refers or endless
        needed = part.one_of or [inner for num, inner in part.needed if num]
        left = [inner for inner in needed if inner.shortest == math.inf and id(inner) not in seen][:1]
    return endless


def _measured(schema: Any, reads_patterns: bool) -> list[_Part] | None:
    """All parts, the root first, with their shortest values."""
    try:
        parts = _Reader(schema, reads_patterns).read()
    except (_NotKnown, RecursionError):
        return None
    # A part is known as soon as those are that its value needs; then whoever needs it may be, too.
    users: dict[int, list[_Part]] = {}
    for part in parts:
        for inner in part.inner():
            users.setdefault(id(inner), []).append(part)
    left, num_looks = list(parts), 0
    while left:
        part = left.pop()
        found = part.look()
        if found < part.shortest:
            part.shortest = found
            left += users.get(id(part), ())
            num_looks += 1
            if num_looks > MAX_LOOKS:
                return None
    return parts


def _total(root: _Part) -> float | None:
    """Of a part and all that may be inside of it; None: it may be inside of itself."""
    found: dict[int, float] = {}
    open_parts: set[int] = set()
    stack: list[tuple[_Part, bool]] = [(root, False)]
    while stack:
        part, is_done = stack.pop()
        if is_done:
            open_parts.discard(id(part))
            found[id(part)] = part.missing + max((found[id(inner)] for inner in part.inner()), default=0)
        elif id(part) in open_parts:
            return None
        elif id(part) not in found:
            open_parts.add(id(part))
            stack.append((part, True))
            stack += [(inner, False) for inner in part.inner() if id(inner) not in found]
    return found[id(root)]


class _Reader:
    """Of one schema, its references found."""

    def __init__(self, schema: Any, reads_patterns: bool) -> None:
        """``reads_patterns``: else a text that must match one counts as empty."""
        self._root, self._reads_patterns = schema, reads_patterns
        self._patterns: dict[str, int] = {}
        self._parts: list[_Part] = []
        self._by_id: dict[int, _Part] = {}
        self._anything: _Part | None = None

    def read(self) -> list[_Part]:
        """The root first."""
        self._part(self._root)
        return self._parts

    def _new(self) -> _Part:
        if len(self._parts) >= MAX_PARTS:
            raise _NotKnown
        part = _Part()
        self._parts.append(part)
        return part

    def _any(self) -> _Part:
        if self._anything is None:
            self._anything = any_part = self._new()
            any_part.one_of = [self._typed(name, {}) for name in _TYPES]
        return self._anything

    def _part(self, schema: Any) -> _Part:
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, dict):
            raise _NotKnown
        known = self._by_id.get(id(schema))
        if known is not None:
            return known
        part = self._by_id[id(schema)] = self._new()
        words = {word: value for word, value in schema.items() if word not in _SAYS_NOTHING}
        if not words:
            part.one_of = [self._any()]
        elif len(words) == 1 and (alone := next(iter(words))) in ("$ref", "anyOf", "oneOf", "allOf"):
            value = words[alone]
            if alone == "$ref":
                part.refers = schema
                part.one_of = [self._part(self._referred(value))]
            elif not isinstance(value, list) or not value or (alone == "allOf" and len(value) > 1):
                raise _NotKnown
            else:
                part.one_of = [self._part(each) for each in value]
        elif "enum" in words or "const" in words:
            if len(words) > 1 + ("type" in words):
                raise _NotKnown
            values = words["enum"] if "enum" in words else [words["const"]]
            if not isinstance(values, list):
                raise _NotKnown
            lengths = [len(json.dumps(value)) + _ESCAPE for value in values]
            part.fixed = max(lengths, default=0)
        else:
            part.one_of = self._by_type(words)
        return part

    def _by_type(self, words: dict[str, Any]) -> list[_Part]:
        asked = words.pop("type", list(_TYPES))
        names = ["number" if name == "integer" else name for name in (asked if isinstance(asked, list) else [asked])]
        known = {word for name in names if isinstance(name, str) for word in _OF_TYPE.get(name, ())}
        if not names or not words.keys() <= known or not all(name in _TYPES for name in names):
            raise _NotKnown
        return [self._typed(name, words) for name in names]

    def _typed(self, name: str, words: dict[str, Any]) -> _Part:
        part = self._new()
        match name:
            case "object":
                self._object(part, words)
            case "array":
                self._array(part, words)
            case "string":
                part.fixed = self._text(words)
                part.begun = _ESCAPE
            case "number":
                bounds = [words[word] for word in _OF_TYPE["number"] & words.keys()]
                if any(isinstance(each, bool) or not isinstance(each, int | float) for each in bounds):
                    raise _NotKnown
                part.fixed = _NUMBER + 2 * max((len(repr(each)) for each in bounds), default=0)
            case _:
                part.fixed = _WORD
        return part

    def _object(self, part: _Part, words: dict[str, Any]) -> None:
        properties, required = words.get("properties", {}), words.get("required", [])
        others = words.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _NotKnown
        if not all(isinstance(name, str) for name in required):
            raise _NotKnown
        part.fixed, part.begun = 2, _ESCAPE
        if others is not False:
            part.possible.append(self._part(others))
        for name, schema in properties.items():
            length = len(json.dumps(name)) + 2
            if schema is False:
                continue
            inner = self._part(schema)
            if name in required:
                part.fixed += length
                part.needed.append((1, inner))
            else:
                part.begun = max(part.begun, length + _ESCAPE)
                part.possible.append(inner)
        for name in required:
            if name not in properties:
                if others is False:
                    raise _NotKnown
                part.fixed += len(json.dumps(name)) + 2
                part.needed.append((1, self._part(others)))

    def _array(self, part: _Part, words: dict[str, Any]) -> None:
        first, others, num = words.get("prefixItems", []), words.get("items", True), words.get("minItems", 0)
        if not isinstance(first, list) or not isinstance(num, int):
            raise _NotKnown
        part.fixed, part.begun = 2 + num, 2
        for place, schema in enumerate(first):
            part.needed.append((int(place < num), self._part(schema)))
        if others is not False:
            part.needed.append((max(0, num - len(first)), self._part(others)))
        part.possible = [inner for _, inner in part.needed]

    def _text(self, words: dict[str, Any]) -> int:
        pattern = words.get("pattern")
        if pattern is not None:
            if not self._reads_patterns:
                return _QUOTES
            if words.keys() - {"pattern"} or not isinstance(pattern, str):
                raise _NotKnown
            if pattern not in self._patterns:
                if len(self._patterns) >= MAX_PATTERNS:
                    raise _NotKnown
                try:
                    self._patterns[pattern] = Expression(pattern).farthest
                except NotRead:
                    raise _NotKnown from None
            return self._patterns[pattern] + _QUOTES
        num = words.get("minLength", 0)
        if not isinstance(num, int) or ("format" in words and words.keys() - {"format"}):
            raise _NotKnown
        return num + _QUOTES + (_FORMAT if "format" in words else 0)

    def _referred(self, reference: Any) -> Any:
        try:
            return referred(self._root, reference)
        except LookupError:
            raise _NotKnown from None


def referred(root: Any, reference: Any) -> Any:
    """What a schema's ``$ref`` stands for. Raises LookupError where that is not known."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError(reference)
    node = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if "%" in step:
            raise LookupError(reference)
        try:
            node = node[int(step)] if isinstance(node, list) else node[step]
        except (ValueError, TypeError):
            raise LookupError(reference) from None
    return node


def patterns_of(schema: Any) -> list[str]:
    """All that its strings must match, and what leads to the ends of those that have a format."""
    found: dict[str, None] = {}
    level = [schema]
    while level:
        for each in level:
            if isinstance(each, dict) and isinstance(pattern := each.get("pattern"), str):
                found[pattern] = None
            if isinstance(each, dict) and isinstance(name := each.get("format"), str) and name in FORMATS:
                found[FORMATS[name]] = None
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return list(found)[:MAX_PATTERNS]
