"""Where an answer is in its schema: all that what may follow depends on, and of values that are over no more than that.

Of open objects it is the names that they have so far, of open lists how many values as far as that counts, of a text
that is under way how long it is, or where in its pattern, of any other short value its bytes. What may follow a value
depends on the value itself only where alternatives have to be told apart by it; such values are lost, as are all that
are not read here: nothing is known of an answer until they are over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from policies.expressions import Expression, NotRead
from policies.schemas import referred

MAX_COUNTED = 256
"""Characters of a text whose length is bounded; longer ones are lost."""
MAX_LEVELS = 32
MAX_NUMBER_BYTES = 3
MAX_CHOICE_BYTES = 64
_MAX_REFERENCES = 32
_ANYTHING = -1
"""In place of a schema: nothing is read of it."""

_BLANKS = b" \t\n\r"
_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_NOTES = frozenset({"$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples"})
_OF_LISTS = frozenset({"items", "minItems", "maxItems"})
_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_READ = _OF_LISTS | _OF_TEXTS | _OF_OBJECTS | _OF_NUMBERS | {"type"}
_TYPES: dict[int, tuple[str, ...]] = {
    _QUOTE: ("string",),
    _OPEN_LIST: ("array",),
    _OPEN_OBJECT: ("object",),
    ord("n"): ("null",),
    **dict.fromkeys(b"tf", ("boolean",)),
    **dict.fromkeys(b"-0123456789", ("number", "integer")),
}
"""By the first byte of a value."""


@dataclass(frozen=True, slots=True)
class _Value:
    """One is due."""

    schema: int
    above: _Above
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class _Object:
    schema: int
    above: _Above
    names: tuple[bytes, ...] = ()
    last: int = _OPEN_OBJECT
    """What it has come to: its opening, a name's quote, the colon and the value behind it, or a comma."""
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class _Name:
    """Of a property."""

    within: _Object
    said: bytes = b""


@dataclass(frozen=True, slots=True)
class _List:
    schema: int
    above: _Above
    num_values: int = 0
    """As far as it is counted."""
    is_open: bool = True
    """Nothing has come yet."""
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class _Text:
    """Whose length is all that counts."""

    schema: int
    above: _Above
    num_chars: int = 0
    """As far as they are counted."""
    begun: bytes = b""
    """Of a character that is not whole."""


@dataclass(frozen=True, slots=True)
class _Matching:
    """A text that has to match an expression."""

    pattern: str
    above: _Above
    states: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Short:
    """Another value."""

    above: _Above
    said: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class _Lost:
    """In a value of which nothing is known but where it ends."""

    above: _Above
    num_levels: int = 0
    is_text: bool = False
    is_escaped: bool = False


@dataclass(frozen=True, slots=True)
class _Over:
    num_blanks: int = 0


_Above = _Object | _List | None
State = _Value | _Object | _Name | _List | _Text | _Matching | _Short | _Lost | _Over


class Outline:
    """Of one schema, as ``policies.grammar`` has it spelled."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._schemas: list[dict[str, Any]] = []
        """Without references and notes; those that are all read."""
        self._numbers: dict[int, int] = {}
        self._expressions: dict[str, Expression | None] = {}

    @property
    def is_read(self) -> bool:
        """Anything of it."""
        return self._number(self._root) != _ANYTHING

    def begin(self) -> State:
        """Before any byte."""
        return _Value(self._number(self._root), None)

    def weight(self, state: State) -> int:
        """Of memory, in numbers or so."""
        return 8 + (len(state.states) if isinstance(state, _Matching) else 0)

    def tells(self, state: State) -> bool:
        """What may follow depends on nothing else."""
        return not isinstance(state, _Lost)

    def after(self, state: State, byte: int) -> State | None:
        """With one more byte; None: no schema has it there."""
        match state:
            case _Value() | _Object() | _List() | _Over() if byte in _BLANKS:
                return replace(state, num_blanks=state.num_blanks + 1)
            case _Value():
                return self._begun(state, byte)
            case _Object():
                return self._in_object(state, byte)
            case _Name():
                return self._in_name(state, byte)
            case _List():
                return self._in_list(state, byte)
            case _Text() | _Matching():
                return self._in_text(state, byte)
            case _Short():
                return self._in_short(state, byte)
            case _Lost():
                return self._in_lost(state, byte)
            case _:
                return None

    def _begun(self, due: _Value, byte: int) -> State | None:
        """A value, by its first byte."""
        above, schema = due.above, self._alternative(due.schema, byte)
        words = {} if schema == _ANYTHING else self._schemas[schema]
        if "enum" in words or "const" in words:
            return _Short(above, bytes([byte]), MAX_CHOICE_BYTES) if byte not in b"[{" else _Lost(above, 1)
        if byte in b"[{" and (schema == _ANYTHING or _num_levels(above) >= MAX_LEVELS):
            return _Lost(above, 1)
        if byte == _OPEN_OBJECT:
            return _Object(schema, above)
        if byte == _OPEN_LIST:
            return _List(schema, above)
        if byte != _QUOTE:
            return _Short(above, bytes([byte]), MAX_NUMBER_BYTES) if byte in _TYPES else None
        if schema == _ANYTHING or "format" in words:
            return _Lost(above, is_text=True)
        if "pattern" not in words:
            return _Text(schema, above)
        expression = self._expression(words["pattern"])
        if expression is None or words.keys() & {"minLength", "maxLength"}:
            return _Lost(above, is_text=True)
        return _Matching(words["pattern"], above, expression.begin())

    def _in_object(self, state: _Object, byte: int) -> State | None:
        last, within = state.last, replace(state, num_blanks=0)
        if byte == _QUOTE and last in (_OPEN_OBJECT, _COMMA):
            return _Name(within)
        if byte == _COLON and last == _QUOTE:
            schema = self._schemas[state.schema]["properties"][state.names[-1].decode()]
            return _Value(self._number(schema), replace(within, last=_COLON))
        if byte == _COMMA and last == _COLON:
            return replace(within, last=_COMMA)
        if byte == _CLOSE_OBJECT and last in (_OPEN_OBJECT, _COLON):
            return _ended(state.above)
        return None

    def _in_name(self, state: _Name, byte: int) -> State | None:
        within, said = state.within, state.said
        names = [name.encode("utf-8", "surrogatepass") for name in self._schemas[within.schema].get("properties", {})]
        if byte == _QUOTE and said in names:
            return replace(within, names=(*within.names, said), last=_QUOTE)
        said += bytes([byte])
        if byte not in b'"\\' and any(name.startswith(said) for name in names):
            return _Name(within, said)
        # What else an object may have is not followed, nor is the object from there on.
        return _Lost(within.above, 1, byte != _QUOTE, byte == _ESCAPE)

    def _in_list(self, state: _List, byte: int) -> State | None:
        words, within = self._schemas[state.schema], replace(state, num_blanks=0)
        if byte == _CLOSE_LIST:
            return _ended(state.above)
        if not state.is_open and byte != _COMMA:
            return None
        limit = words.get("maxItems", words.get("minItems", 0))
        more = replace(within, num_values=min(state.num_values + 1, limit), is_open=False)
        due = _Value(self._number(words.get("items", True)), more)
        return self.after(due, byte) if state.is_open else due

    def _in_text(self, state: _Text | _Matching, byte: int) -> State | None:
        if byte == _QUOTE:
            return _ended(state.above)
        if byte == _ESCAPE or byte < 0x20:
            return _lost(state.above, _QUOTE, byte)
        if isinstance(state, _Matching):
            expression = self._expressions[state.pattern]
            assert expression is not None
            states = expression.after(state.states, chr(byte)) if byte < 0x80 else frozenset[int]()
            return replace(state, states=states) if states else _lost(state.above, _QUOTE, byte)
        words = self._schemas[state.schema]
        limit = words.get("maxLength", words.get("minLength", 0))
        if limit > MAX_COUNTED:
            return _lost(state.above, _QUOTE, byte)
        begun = state.begun + bytes([byte])
        if byte >= 0x80 and len(begun) < _num_bytes(begun[0]):
            return replace(state, begun=begun)
        return replace(state, num_chars=min(state.num_chars + 1, limit), begun=b"")

    def _in_short(self, state: _Short, byte: int) -> State | None:
        above, said = state.above, state.said
        if said[0] == _QUOTE == byte:
            return _ended(above)
        if said[0] != _QUOTE and _ends_word(byte):
            return self.after(_ended(above), byte)
        if len(said) < state.max_bytes and byte != _ESCAPE:
            return replace(state, said=said + bytes([byte]))
        return _lost(above, said[0], byte)

    def _in_lost(self, state: _Lost, byte: int) -> State | None:
        above, num_levels = state.above, state.num_levels
        if state.is_text:
            if state.is_escaped or byte != _QUOTE:
                return replace(state, is_escaped=byte == _ESCAPE and not state.is_escaped)
            return replace(state, is_text=False) if num_levels else _ended(above)
        if not num_levels and _ends_word(byte):
            return self.after(_ended(above), byte)
        if byte in b"]}" and num_levels == 1:
            return _ended(above)
        return replace(state, num_levels=num_levels + (byte in b"[{") - (byte in b"]}"), is_text=byte == _QUOTE)

    # What schemas say

    def _alternative(self, schema: int, byte: int) -> int:
        """The one that a value is of that begins so."""
        for _ in range(_MAX_REFERENCES):
            if schema == _ANYTHING or "anyOf" not in self._schemas[schema]:
                return schema
            each = [self._number(alternative) for alternative in self._schemas[schema]["anyOf"]]
            possible = [number for number in each if number == _ANYTHING or _may_begin(self._schemas[number], byte)]
            schema = possible[0] if len(possible) == 1 else _ANYTHING
        return _ANYTHING

    def _number(self, schema: Any) -> int:
        number = self._numbers.get(id(schema))
        if number is None:
            words = self._read(schema)
            number = self._numbers[id(schema)] = _ANYTHING if words is None else len(self._schemas)
            self._schemas += () if words is None else (words,)
        return number

    def _read(self, schema: Any) -> dict[str, Any] | None:
        """None: it says more than is read here, or nothing."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                return None
            words = {word: value for word, value in schema.items() if word not in _NOTES}
            if words.keys() != {"$ref"}:
                return words if _is_read(words) else None
            try:
                schema = referred(self._root, words["$ref"])
            except LookupError:
                return None
        return None

    def _expression(self, pattern: str) -> Expression | None:
        if pattern not in self._expressions:
            try:
                self._expressions[pattern] = Expression(pattern)
            except NotRead:
                self._expressions[pattern] = None
        return self._expressions[pattern]


def _is_read(words: dict[str, Any]) -> bool:
    if words.keys() == {"anyOf"}:
        return isinstance(words["anyOf"], list)
    if words.keys() & {"enum", "const"}:
        return words.keys() <= {"enum", "const", "type"}
    counts = [words[word] for word in ("minItems", "maxItems", "minLength", "maxLength") if word in words]
    return (
        bool(words)
        and words.keys() <= _READ
        and all(isinstance(count, int) for count in counts)
        and isinstance(words.get("properties", {}), dict)
        and isinstance(words.get("pattern", ""), str)
    )


def _may_begin(words: dict[str, Any], byte: int) -> bool:
    """A value of this schema, with this byte."""
    if "type" in words:
        asked = words["type"]
        return any(name in (asked if isinstance(asked, list) else [asked]) for name in _TYPES.get(byte, ()))
    values = words["enum"] if "enum" in words else [words["const"]] if "const" in words else None
    return values is None or any(json.dumps(value).encode()[0] == byte for value in values)


def _num_levels(above: _Above) -> int:
    num = 0
    while above is not None:
        num, above = num + 1, above.above
    return num


def _ended(above: _Above) -> State:
    """After a value."""
    return _Over() if above is None else above


def _lost(above: _Above, first: int, byte: int) -> _Lost:
    """In a value with this first byte, and now this one."""
    return _Lost(above, 0, first == _QUOTE, first == _QUOTE and byte == _ESCAPE)


def _ends_word(byte: int) -> bool:
    return byte in b",]} \t\n\r"


def _num_bytes(first: int) -> int:
    """Of a character that begins with this one."""
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4
