"""Where an answer is in its schema: all that what may follow depends on, and of values that are over no more than that.

Of open objects it is the names that they have so far, of open lists how many values as far as that counts, of a text
that is under way how long it is, or where in its pattern, of a number without bounds its part, of any other short value
its bytes. What may follow a value depends on the value itself only where alternatives have to be told apart by it; such
values are lost, as are all that are not read here: nothing is known of an answer until they are over.
"""

from __future__ import annotations

from typing import Any

from policies.expressions import Expression, NotRead
from policies.grammar import MAX_BLANKS
from policies.schemas import referred
from worker.grammar.keywords import NOTES, OF_NUMBERS, OPEN_LIST, QUOTE, TYPES, is_read, may_begin, types
from worker.grammar.kinds import kinds_of, kinds_of_pattern
from worker.grammar.lengths import BLANKS
from worker.grammar.states import (
    ESCAPE,
    OPEN_OBJECT,
    Above,
    List,
    Lost,
    Matching,
    Name,
    Number,
    Object,
    Over,
    Short,
    State,
    Text,
    Value,
    changed,
    char_after,
    number_after,
)

MAX_COUNTED = 256
"""Characters of a text whose length is bounded; longer ones are lost."""
MAX_LEVELS = 32
MAX_NUMBER_BYTES = 3
"""Of one that has bounds."""
MAX_WORD_BYTES = 5
MAX_CHOICE_BYTES = 64
ENDLESS = 1 << 30
"""Characters of a text that may be as long as it likes."""
MAX_AROUND = 4096
"""Objects and lists that are open, of which it is remembered what they are like."""
_MAX_REFERENCES = 32
_UNREAD = -1
"""In place of a schema: nothing is known of its values."""
_ANY = -2
"""In place of one that says nothing: each value is one of its."""

_COMMA, _COLON, _CLOSE_LIST, _CLOSE_OBJECT = b",:]}"
_AMONG_BLANKS = (Value, Object, List, Over)
_PLAIN = sum(1 << byte for byte in range(0x20, 0x7F) if byte not in (QUOTE, ESCAPE))
"""Characters that are in a text as they are, one bit each."""


class Outline:
    """Of one schema, as ``policies.grammar`` has it spelled."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._schemas: list[dict[str, Any]] = []
        """Without references and notes; those that are all read."""
        self._numbers: dict[int, int] = {}
        self._expressions: dict[str, Expression | None] = {}
        self._kinds: dict[str, bytes] = {}
        """Of bytes, by pattern."""
        self._around: dict[tuple[State, int], State] = {}
        """See ``alike``, of what is open."""

    @property
    def is_read(self) -> bool:
        """Anything of it."""
        return self._number(self._root) != _UNREAD

    def begin(self) -> State:
        """Before any byte."""
        return Value(self._number(self._root), None)

    def weight(self, state: State) -> int:
        """Of memory, in numbers or so."""
        return 8 + (len(state.states) if isinstance(state, Matching) else 0)

    def tells(self, state: State) -> bool:
        """What may follow depends on nothing else."""
        return not isinstance(state, Lost)

    def kinds(self, state: State) -> bytes:
        """Of each byte a number that those share that lead to where it does."""
        return self._kinds[state.pattern] if isinstance(state, Matching) else kinds_of(state)

    def room(self, state: State) -> int | None:
        """Of a text in which there is a choice: how many plain characters it has room for. None: nothing is known."""
        if not isinstance(state, Text) or state.begun[:1] == b"\\":
            return None
        if state.begun:
            return 0
        most = self._words(state.schema).get("maxLength")
        return ENDLESS if most is None else most - state.num_chars or None

    def plain(self, state: State) -> int:
        """The characters of ASCII that may come next, one bit each; none where that is not known."""
        if not isinstance(state, Matching):
            return 0
        expression = self._expressions[state.pattern]
        assert expression is not None
        return expression.plain(state.states) & _PLAIN

    def limit(self, state: State) -> tuple[str, int] | None:
        """Of what an answer is in the middle of, how much more of it may come, if that is all that counts there: so
        many of these (see worker.grammar.lengths)."""
        if isinstance(state, Text):
            words, begun = self._words(state.schema), state.begun
            num_left: int = words.get("maxLength", 0) - state.num_chars
            if num_left <= 0 or state.num_chars < words.get("minLength", 0):
                return None
            if begun[:1] == b"\\":
                return ("escaped", num_left) if len(begun) == 1 else None
            # What a character lacks yet is no character of its own.
            return ("chars", num_left - 1 if begun else num_left)
        num_blanks = state.num_blanks if isinstance(state, _AMONG_BLANKS) else 0
        return ("blanks", MAX_BLANKS - num_blanks) if 0 < num_blanks < MAX_BLANKS else None

    def alike(self, state: State, num_ended: int) -> State:
        """One in which the same token may come, as long as none ends more than so many values of a list: how many there
        are counts near a bound only. Where there is a limit, it is that of one that has the highest of all."""
        limit = self.limit(state)
        if limit is not None:
            state = self._begun_again(state)
        if isinstance(state, Over):
            return state
        around = state.within if isinstance(state, Name) else state.above
        like: Any = None if around is None else self._alike_around(around, num_ended)
        if isinstance(state, Name):
            return state if like is around else changed(state, "within", like)
        if isinstance(state, List):
            words, num_values = self._words(state.schema), state.num_values
            least, most = words.get("minItems", 0), words.get("maxItems", 0)
            first = 1 if num_values < least else max(1, least)
            if first < num_values and num_values + num_ended < (least if num_values < least else most):
                return List(state.schema, like, first, state.is_open, state.num_blanks)
        return state if like is around else changed(state, "above", like)

    def _alike_around(self, around: Object | List, num_ended: int) -> State:
        known = self._around.get((around, num_ended))
        if known is None:
            if len(self._around) >= MAX_AROUND:
                self._around.clear()
            known = self._around[around, num_ended] = self.alike(around, num_ended)
        return known

    def _begun_again(self, state: State) -> State:
        """With as little as there can be of what is limited in it."""
        if isinstance(state, Text):
            least = self._words(state.schema).get("minLength", 0)
            return state if state.num_chars == least else changed(state, "num_chars", least)
        assert isinstance(state, _AMONG_BLANKS)
        return state if state.num_blanks == 1 else changed(state, "num_blanks", 1)

    def after(self, state: State, byte: int) -> State | None:
        """With one more byte; None: no schema has it there."""
        match state:
            case Value() | Object() | List() | Over() if byte in BLANKS:
                return changed(state, "num_blanks", state.num_blanks + 1)
            case Value():
                return self._begun(state, byte)
            case Object():
                return self._in_object(state, byte)
            case Name():
                return self._in_name(state, byte)
            case List():
                return self._in_list(state, byte)
            case Text():
                return self._in_text(state, byte)
            case Matching():
                return self._in_matching(state, byte)
            case Number():
                return self._in_number(state, byte)
            case Short():
                return self._in_short(state, byte)
            case Lost():
                return self._in_lost(state, byte)
            case _:
                return None

    def _begun(self, due: Value, byte: int) -> State | None:
        """A value, by its first byte."""
        above, schema = due.above, self._alternative(due.schema, byte)
        words = self._words(schema)
        if "enum" in words or "const" in words:
            return Short(above, bytes([byte]), MAX_CHOICE_BYTES) if byte not in b"[{" else Lost(above, 1)
        if byte in b"[{" and (schema == _UNREAD or _num_levels(above) >= MAX_LEVELS):
            return Lost(above, 1)
        if byte == OPEN_OBJECT:
            is_any = (
                words.keys() <= {"type", "additionalProperties"} and words.get("additionalProperties", True) is True
            )
            return Object(_ANY if is_any else schema, above)
        if byte == OPEN_LIST:
            return List(schema, above)
        if byte == QUOTE:
            return self._begun_text(schema, above)
        part = None if schema == _UNREAD or words.keys() & OF_NUMBERS else number_after("", byte)
        if part is not None:
            return Number("number" not in types(words), above, part)
        most = MAX_WORD_BYTES if byte in b"tfn" else MAX_NUMBER_BYTES
        return Short(above, bytes([byte]), most) if byte in TYPES else None

    def _begun_text(self, schema: int, above: Above) -> State:
        words = self._words(schema)
        if schema == _UNREAD or "format" in words:
            return Lost(above, is_text=True)
        if "pattern" not in words:
            return Text(schema, above)
        expression = self._expression(words["pattern"])
        if expression is None or words.keys() & {"minLength", "maxLength"}:
            return Lost(above, is_text=True)
        return Matching(words["pattern"], above, expression.begin())

    def _in_object(self, state: Object, byte: int) -> State | None:
        schema, above, names, last = state.schema, state.above, state.names, state.last
        is_any = schema == _ANY
        if byte == QUOTE and last in (OPEN_OBJECT, _COMMA):
            if is_any:
                return Text(_ANY, Object(schema, above, names, QUOTE))
            return Name(Object(schema, above, names, last))
        if byte == _COLON and last == QUOTE:
            due = True if is_any else self._schemas[schema]["properties"][names[-1].decode()]
            return Value(self._number(due), Object(schema, above, names, _COLON))
        if byte == _COMMA and last == _COLON:
            return Object(schema, above, names, _COMMA)
        if byte == _CLOSE_OBJECT and last in (OPEN_OBJECT, _COLON):
            return _ended(above)
        return None

    def _in_name(self, state: Name, byte: int) -> State | None:
        within, said = state.within, state.said
        names = [name.encode("utf-8", "surrogatepass") for name in self._schemas[within.schema].get("properties", {})]
        if byte == QUOTE and said in names:
            return Object(within.schema, within.above, (*within.names, said), QUOTE)
        said += bytes([byte])
        if byte not in b'"\\' and any(name.startswith(said) for name in names):
            return Name(within, said)
        # What else an object may have is not followed, nor is the object from there on.
        return Lost(within.above, 1, byte != QUOTE, byte == ESCAPE)

    def _in_list(self, state: List, byte: int) -> State | None:
        words, above = self._words(state.schema), state.above
        if byte == _CLOSE_LIST:
            return _ended(above)
        if not state.is_open and byte != _COMMA:
            return None
        limit = words.get("maxItems", words.get("minItems", 0))
        more = List(state.schema, above, min(state.num_values + 1, limit), False)
        due = Value(self._number(words.get("items", True)), more)
        return self.after(due, byte) if state.is_open else due

    def _in_text(self, state: Text, byte: int) -> State | None:
        if byte == QUOTE and not state.begun:
            return _ended(state.above)
        words = self._words(state.schema)
        limit = words.get("maxLength", words.get("minLength", 0))
        begun = char_after(state.begun, byte) if byte >= 0x20 and limit <= MAX_COUNTED else None
        if begun is None:
            return Lost(state.above, 0, True, byte == ESCAPE and not state.begun)
        return Text(state.schema, state.above, state.num_chars if begun else min(state.num_chars + 1, limit), begun)

    def _in_matching(self, state: Matching, byte: int) -> State | None:
        if byte == QUOTE:
            return _ended(state.above)
        expression = self._expressions[state.pattern]
        assert expression is not None
        is_read = 0x20 <= byte < 0x80 and byte != ESCAPE
        states = expression.after(state.states, chr(byte)) if is_read else frozenset[int]()
        return Matching(state.pattern, state.above, states) if states else _lost(state.above, QUOTE, byte)

    def _in_number(self, state: Number, byte: int) -> State | None:
        if _ends_word(byte):
            return self.after(_ended(state.above), byte)
        part = number_after(state.part, byte)
        return None if part is None else Number(state.is_integer, state.above, part)

    def _in_short(self, state: Short, byte: int) -> State | None:
        above, said = state.above, state.said
        if said[0] == QUOTE == byte:
            return _ended(above)
        if said[0] != QUOTE and _ends_word(byte):
            return self.after(_ended(above), byte)
        if len(said) < state.max_bytes and byte != ESCAPE:
            return Short(above, said + bytes([byte]), state.max_bytes)
        return _lost(above, said[0], byte)

    def _in_lost(self, state: Lost, byte: int) -> State | None:
        above, num_levels = state.above, state.num_levels
        if state.is_text:
            if state.is_escaped or byte != QUOTE:
                return changed(state, "is_escaped", byte == ESCAPE and not state.is_escaped)
            return changed(state, "is_text", False) if num_levels else _ended(above)
        if not num_levels and _ends_word(byte):
            return self.after(_ended(above), byte)
        if byte in b"]}" and num_levels == 1:
            return _ended(above)
        return Lost(above, num_levels + (byte in b"[{") - (byte in b"]}"), byte == QUOTE)

    # What schemas say

    def _alternative(self, schema: int, byte: int) -> int:
        """The one that a value is of that begins so."""
        for _ in range(_MAX_REFERENCES):
            if "anyOf" not in self._words(schema):
                return schema
            each = [self._number(alternative) for alternative in self._schemas[schema]["anyOf"]]
            possible = [number for number in each if number < 0 or may_begin(self._schemas[number], byte)]
            schema = possible[0] if len(possible) == 1 else _UNREAD
        return _UNREAD

    def _number(self, schema: Any) -> int:
        number = self._numbers.get(id(schema))
        if number is None:
            words = self._read(schema)
            number = _UNREAD if words is None else len(self._schemas) if words else _ANY
            self._numbers[id(schema)] = number
            self._schemas += (words,) if words else ()
        return number

    def _words(self, schema: int) -> dict[str, Any]:
        return {} if schema < 0 else self._schemas[schema]

    def _read(self, schema: Any) -> dict[str, Any] | None:
        """None: it says more than is read here."""
        for _ in range(_MAX_REFERENCES):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                return None
            words = {word: value for word, value in schema.items() if word not in NOTES}
            if words.keys() != {"$ref"}:
                return words if is_read(words) else None
            try:
                schema = referred(self._root, words["$ref"])
            except LookupError:
                return None
        return None

    def _expression(self, pattern: str) -> Expression | None:
        if pattern not in self._expressions:
            try:
                expression = self._expressions[pattern] = Expression(pattern)
                self._kinds[pattern] = kinds_of_pattern(expression)
            except NotRead:
                self._expressions[pattern] = None
        return self._expressions[pattern]


def _num_levels(above: Above) -> int:
    num = 0
    while above is not None:
        num, above = num + 1, above.above
    return num


def _ended(above: Above) -> State:
    """After a value."""
    return Over() if above is None else above


def _lost(above: Above, first: int, byte: int) -> Lost:
    """In a value with this first byte, and now this one."""
    return Lost(above, 0, first == QUOTE, first == QUOTE and byte == ESCAPE)


def _ends_word(byte: int) -> bool:
    return byte in b",]} \t\n\r"
