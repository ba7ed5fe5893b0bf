"""Bytes that lead on alike, by what a JSON text is in the middle of: whoever has followed one knows of the others."""

from __future__ import annotations

from policies.expressions import Expression
from worker.grammar.keywords import QUOTE
from worker.grammar.lengths import BLANKS
from worker.grammar.states import ESCAPE, LEADS, List, Lost, Number, Object, Over, Short, State, Text, Value

EACH_BYTE = bytes(range(256))
"""Where nothing is known of them: itself."""
_CHARS = bytes([LEADS[byte] if byte >= 0xC0 else byte & 0x80 | 0x20 for byte in EACH_BYTE])
_IN_TEXT = bytes([byte if byte < 0x20 or byte in b'"\\' else _CHARS[byte] for byte in EACH_BYTE])
"""Of all ASCII that says nothing else, of all bytes that do not come first in a character, and of those that do and ask
for as much, one each."""
_BETWEEN = EACH_BYTE.translate(bytes.maketrans(BLANKS, b" " * len(BLANKS)))
_IN_NUMBER = _BETWEEN.translate(bytes.maketrans(b"23456789E", b"11111111e"))


def kinds_of(state: State) -> bytes:
    """Of each byte the one that stands for it."""
    match state:
        case Value() | Object() | List() | Over():
            return _BETWEEN
        case Short() if state.said[0] != QUOTE:
            return _BETWEEN
        case Number():
            return _IN_NUMBER
        case Text() if state.begun[:1] != b"\\":
            return _IN_TEXT
        case Lost() if state.is_text and not state.is_escaped:
            return _IN_TEXT
    return EACH_BYTE


def kinds_of_pattern(expression: Expression) -> bytes:
    """In a text that has to match it: a number for each byte."""
    kinds = expression.kinds()
    apart = {QUOTE: 0xFE, ESCAPE: 0xFD}
    return bytes([apart.get(byte, kinds[byte] if 0x20 <= byte < 0x80 else 0xFF) for byte in EACH_BYTE])
