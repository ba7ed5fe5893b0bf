"""The shortest way to the end of what an expression describes, from wherever a text is in it.

An automaton of the expression (Thompson 1968, "Regular expression search algorithm"), and each of its states' distance
to its end (Dijkstra 1959). It reads what expressions of schemas are mostly made of, and says so where it does not; what
is allowed is llguidance's to say.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_STATES = 4000
_ENDLESS = 1 << 30
_ASCII = (1 << 0x80) - 1
_CLASSES = {
    "d": ((0x30, 0x39),),
    "w": ((0x61, 0x7A), (0x41, 0x5A), (0x30, 0x39), (0x5F, 0x5F)),
    "s": ((0x20, 0x20), (0x09, 0x0D)),
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_OCTETS = r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}"
_HEX = "[0-9a-fA-F]"
_HEXTETS = f"(?:(?::|(?:{_HEX}+:)+):(?:{_HEX}+(?::{_HEX}+)*)?|(?:{_HEX}+:){{7}}{_HEX}+)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|30)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)$",
    "email": rf"^(?:[^@.]+\.)*[^@.]+@(?:{_LABEL}(?:\.{_LABEL})*|\[{_OCTETS}\])$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "ipv4": f"^{_OCTETS}$",
    "ipv6": f"^{_HEXTETS}$",
    "uuid": f"^{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}$",
    "uri": rf"^[a-zA-Z][a-zA-Z0-9+.-]*:(?:[^%\[]|%{_HEX}{{2}}|\[{_HEXTETS}\])*$",
}
"""Of a schema's ``format``: how such a text ends, whatever else it has to be."""
_LIKED = "a0 -_.A,:/@" + "".join(map(chr, range(0x20, 0x7F)))


class NotRead(ValueError):
    """An expression that is written in another way than is read here."""


@dataclass(frozen=True, slots=True)
class _Chars:
    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False
    ascii: int = field(init=False, compare=False)
    """Those of them that are in ASCII, one bit each."""

    def __post_init__(self) -> None:
        bits = _union((1 << last + 1) - (1 << first) for first, last in self.ranges if first <= last <= 0x7F)
        bits |= _union((1 << 0x80) - (1 << first) for first, last in self.ranges if first < 0x80 <= last)
        object.__setattr__(self, "ascii", _ASCII & ~bits if self.is_negated else bits)

    def has(self, char: str) -> bool:
        return any(first <= ord(char) <= last for first, last in self.ranges) is not self.is_negated


def _union(sets: Iterable[int]) -> int:
    """Of sets of characters, one bit each."""
    found = 0
    for each in sets:
        found |= each
    return found


@lru_cache(1024)
def _cheapest(chars: _Chars) -> str | None:
    """One of them, that takes few bytes in JSON."""
    firsts = [chr(first) for first, _ in chars.ranges if not 0xD800 <= first <= 0xDFFF]
    known = [char for char in (*_LIKED, *firsts, "é", "東") if chars.has(char)]
    return min(known, key=num_bytes, default=None)


_ANY = _Chars(((0x0A, 0x0A),), True)


def num_bytes(text: str) -> int:
    """Of it in a JSON string."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2


def has_choice_outside(source: str) -> bool:
    """Whether it is one of several choices, as a whole."""
    depth, is_class, is_escaped = 0, False, False
    for char in source:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char == "|" and not depth:
            return True
        else:
            depth += (char == "(") - (char == ")")
    return False


class Expression:
    """As a schema's ``pattern`` has it: somewhere in the text, unless it says where."""

    def __init__(self, source: str) -> None:
        """Raises NotRead."""
        self._edges: list[list[tuple[_Chars | None, int]]] = []
        """From each state: what leads on, None for nothing, and where to."""
        begins, ends = source.startswith("^"), source.endswith("$") and not source.endswith("\\$")
        self._source, self._at = source[begins : len(source) - ends], 0
        self._begin = self._state()
        if not begins:
            self._edges[self._begin].append((_ANY, self._begin))
        self._end = self._alternatives(self._begin)
        if self._at < len(self._source):
            raise NotRead("a group is closed that was not opened")
        if (begins or ends) and has_choice_outside(self._source):
            raise NotRead("an end of the text belongs to one of several choices")
        if not ends:
            self._edges[self._end].append((_ANY, self._end))
        self._ways: dict[int, tuple[_Chars | None, int]] = {}
        """From each state, the first step of the shortest way."""
        self._costs = self._distances()
        if self._costs[self._begin] == _ENDLESS:
            raise NotRead("it has no end")
        self._plain = [
            _union(chars.ascii for chars, to in edges if chars is not None and self._costs[to] < _ENDLESS)
            for edges in self._edges
        ]
        """From each state, the characters of ASCII that lead on and to an end, one bit each."""

    @property
    def farthest(self) -> int:
        """Bytes, in a JSON string, from any beginning to an end at most."""
        return max(cost for cost in self._costs if cost < _ENDLESS)

    @property
    def shortest(self) -> int:
        """Bytes of the shortest text."""
        return self._costs[self._begin]

    def kinds(self) -> bytes:
        """Of each character of ASCII a number that those share that lead to where it does, whatever the states are."""
        every = {chars.ascii for edges in self._edges for chars, _ in edges if chars is not None}
        known: dict[tuple[int, ...], int] = {}
        return bytes([known.setdefault(tuple([chars >> code & 1 for chars in every]), code) for code in range(128)])

    def plain(self, states: frozenset[int]) -> int:
        """The characters of ASCII that may come next, one bit each."""
        return _union(self._plain[state] for state in states)

    def begin(self) -> frozenset[int]:
        """The states before any text."""
        return self._closed({self._begin})

    def after(self, states: frozenset[int], char: str) -> frozenset[int]:
        """Those that one more character leads to; none where it has no place."""
        bit = 1 << ord(char) if char.isascii() else 0
        return self._closed(
            {
                to
                for state in states
                for chars, to in self._edges[state]
                if chars is not None and (chars.ascii & bit if bit else chars.has(char))
            }
        )

    def ending(self, text: str) -> str | None:
        """A short way from there to an end; None: it is no beginning."""
        states = self.begin()
        for char in text:
            states = self.after(states, char)
        state = min(states, key=self._costs.__getitem__, default=None)
        if state is None or self._costs[state] == _ENDLESS:
            return None
        found = []
        while self._costs[state]:
            chars, state = self._ways[state]
            found.append("" if chars is None else _cheapest(chars) or "")
        return "".join(found)

    def _closed(self, states: set[int]) -> frozenset[int]:
        left = list(states)
        while left:
            for chars, to in self._edges[left.pop()]:
                if chars is None and to not in states:
                    states.add(to)
                    left.append(to)
        return frozenset(states)

    def _distances(self) -> list[int]:
        before: list[list[tuple[int, int, _Chars | None]]] = [[] for _ in self._edges]
        for state, edges in enumerate(self._edges):
            for chars, to in edges:
                before[to].append((_cost(chars), state, chars))
        costs = [_ENDLESS] * len(self._edges)
        costs[self._end] = 0
        heap = [(0, self._end)]
        while heap:
            cost, state = heapq.heappop(heap)
            for more, origin, chars in before[state] if cost == costs[state] else ():
                if cost + more < costs[origin]:
                    costs[origin] = cost + more
                    self._ways[origin] = chars, state
                    heapq.heappush(heap, (cost + more, origin))
        return costs

    # Reading it; each takes the state before and gives the one behind

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise NotRead("it has too many states")
        self._edges.append([])
        return len(self._edges) - 1

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._source):
            raise NotRead("it ends too soon")
        self._at += 1
        return self._source[self._at - 1]

    def _alternatives(self, begin: int) -> int:
        end = self._state()
        while True:
            branch = self._state()
            self._edges[begin].append((None, branch))
            self._edges[self._sequence(branch)].append((None, end))
            if self._peek() != "|":
                return end
            self._take()

    def _sequence(self, state: int) -> int:
        while self._peek() not in ("", "|", ")"):
            start = self._at
            end = self._atom(state)
            low, high = self._times()
            state = end if (low, high) == (1, 1) else self._repeated(state, end, start, low, high)
        return state

    def _repeated(self, begin: int, end: int, start: int, low: int, high: int | None) -> int:
        """The part that begins at ``start`` in the source, so many times; once it is there."""
        after = self._at
        if low == 0:
            # What is there may be passed over.
            out = self._state()
            self._edges[begin].append((None, out))
            self._edges[end].append((None, out))
            if high is None:
                self._edges[end].append((None, begin))
            num, state = 1, end
        else:
            num, state, out = 1, end, -1
        while num < max(low, high or 0) or (high is None and num < low):
            self._at = start
            before, state = state, self._state()
            self._edges[before].append((None, state))
            before, state = state, self._atom(state)
            num += 1
            if num > low:
                out = self._state() if out < 0 else out
                self._edges[before].append((None, out))
            if num == low and high is None:
                self._edges[state].append((None, before))
        if high is None and low == 1:
            self._edges[end].append((None, begin))
        self._at = after
        if out >= 0:
            self._edges[state].append((None, out))
            return out
        last = self._state()
        self._edges[state].append((None, last))
        return last

    def _times(self) -> tuple[int, int | None]:
        match self._peek():
            case "*":
                found: tuple[int, int | None] = 0, None
            case "+":
                found = 1, None
            case "?":
                found = 0, 1
            case "{":
                text = self._source[self._at + 1 : self._source.find("}", self._at)]
                low, comma, high = text.partition(",")
                if not low.isdecimal() or (high and not high.isdecimal()):
                    raise NotRead("a brace that says no number")
                self._at += len(text) + 1
                found = int(low), (int(high) if high else None) if comma else int(low)
                if found[1] == 0:
                    raise NotRead("a part that never comes")
            case _:
                return 1, 1
        self._take()
        if self._peek() == "?":  # as few as will do: the same texts
            self._take()
        if self._peek() and self._peek() in "*+?{":
            raise NotRead("a number of times of a number of times")
        return found

    def _atom(self, state: int) -> int:
        begin = self._state()
        self._edges[state].append((None, begin))
        match char := self._take():
            case "(":
                if self._peek() == "?":
                    if self._source[self._at : self._at + 2] != "?:":
                        raise NotRead("a group with flags")
                    self._at += 2
                end = self._alternatives(begin)
                if self._take() != ")":
                    raise NotRead("a group is not closed")
                return end
            case "[":
                chars = self._class()
            case ".":
                chars = _ANY
            case "\\":
                chars = self._escape()
            case "^" | "$" | "*" | "+" | "?" | "{" | ")":
                raise NotRead(f"{char} has no place here")
            case _:
                chars = _Chars(((ord(char), ord(char)),))
        end = self._state()
        self._edges[begin].append((chars, end))
        return end

    def _escape(self) -> _Chars:
        char = self._take()
        if char.lower() in _CLASSES:
            return _Chars(_CLASSES[char.lower()], char.isupper())
        if char in "xu":
            num = 2 if char == "x" else 4
            try:
                code = int(self._source[self._at : self._at + num], 16)
            except ValueError:
                raise NotRead("a code that is none") from None
            self._at += num
            return _Chars(((code, code),))
        if char.isalnum() and char not in _ESCAPES:
            raise NotRead(f"\\{char} is not read")
        code = ord(_ESCAPES.get(char, char))
        return _Chars(((code, code),))

    def _class(self) -> _Chars:
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while (char := self._take()) != "]":
            if char == "[" or self._source.startswith(("&&", "--", "~~"), self._at - 1):
                raise NotRead("a class of classes")
            found = self._escape() if char == "\\" else _Chars(((ord(char), ord(char)),))
            if found.is_negated:
                raise NotRead("a class of what is not in one")
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                last = self._escape() if (char := self._take()) == "\\" else _Chars(((ord(char), ord(char)),))
                found = _Chars(((found.ranges[0][0], last.ranges[-1][1]),))
            ranges += found.ranges
        if not ranges:
            raise NotRead("a class that begins with its end")
        return _Chars(tuple(ranges), is_negated)


def _cost(chars: _Chars | None) -> int:
    if chars is None:
        return 0
    cheapest = _cheapest(chars)
    return _ENDLESS if cheapest is None else num_bytes(cheapest)


def read(sources: Iterable[str]) -> list[Expression]:
    """Those of them that can be read."""
    found = []
    for source in sources:
        try:
            found.append(Expression(source))
        except NotRead:
            continue
    return found
