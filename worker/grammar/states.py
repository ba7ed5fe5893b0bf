"""What a JSON text may be in the middle of, and what counts of it: the states of worker.grammar.outline, each within
those that are open around it, and what is read within one.
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN_OBJECT = ord("{")
ESCAPE = ord("\\")
_LONG_LEADS = {**dict.fromkeys(range(0xE1, 0xF0), 0xE1), 0xED: 0xED, **dict.fromkeys(range(0xF1, 0xF4), 0xF1)}
"""First bytes of characters of three and four bytes, after which the same may come."""
_DIGITS = frozenset(b"0123456789")


@dataclass(frozen=True, slots=True)
class Value:
    """One is due."""

    schema: int
    above: Above
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class Object:
    schema: int
    above: Above
    names: tuple[bytes, ...] = ()
    last: int = OPEN_OBJECT
    """What it has come to: its opening, a name's quote, the colon and the value behind it, or a comma."""
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class Name:
    """Of a property."""

    within: Object
    said: bytes = b""


@dataclass(frozen=True, slots=True)
class List:
    schema: int
    above: Above
    num_values: int = 0
    """As far as it is counted."""
    is_open: bool = True
    """Nothing has come yet."""
    num_blanks: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """Whose length is all that counts."""

    schema: int
    above: Above
    num_chars: int = 0
    """As far as they are counted."""
    begun: bytes = b""
    """Of a character that is not whole: see ``char_after``."""


@dataclass(frozen=True, slots=True)
class Matching:
    """A text that has to match an expression."""

    pattern: str
    above: Above
    states: frozenset[int]


@dataclass(frozen=True, slots=True)
class Number:
    """Which has no bounds."""

    is_integer: bool
    above: Above
    part: str
    """See ``number_after``."""


@dataclass(frozen=True, slots=True)
class Short:
    """Another value."""

    above: Above
    said: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """In a value of which nothing is known but where it ends."""

    above: Above
    num_levels: int = 0
    is_text: bool = False
    is_escaped: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    num_blanks: int = 0


Above = Object | List | None
State = Value | Object | Name | List | Text | Matching | Number | Short | Lost | Over


def char_after(begun: bytes, byte: int) -> bytes | None:
    """What has begun of a character, with one more byte: an escape as far as it goes, or a byte that asks for what is
    missing. Empty: nothing; None: it is not followed."""
    if begun[:1] == b"\\":
        begun += bytes([byte])
        if len(begun) == 4 and begun[2] in b"dD" and begun[3] in b"89abAB":
            return None  # half of a character
        return b"" if len(begun) == 6 or (len(begun) == 2 and byte != ord("u")) else begun
    if begun:
        return b"" if begun[0] < 0xE0 else b"\xc2" if begun[0] < 0xF0 else b"\xe1"
    if byte < 0x80:
        return b"\\" if byte == ESCAPE else b""
    return b"\xc2" if byte < 0xE0 else bytes([_LONG_LEADS.get(byte, byte)])


def number_after(part: str, byte: int) -> str | None:
    """The part of a number with one more byte: its sign, "0", "1" for other digits, ".", "f" for those behind, "e", "+"
    for its sign, "x" for its digits. None: it is none any more. ``part`` is empty before its first byte."""
    if byte in _DIGITS:
        if part in ("", "-"):
            return "0" if byte == ord("0") else "1"
        return {"1": "1", ".": "f", "f": "f", "e": "x", "+": "x", "x": "x"}.get(part)
    if byte in b"eE":
        return "e" if part in ("0", "1", "f") else None
    if byte == ord("."):
        return "." if part in ("0", "1") else None
    return "-" if byte == ord("-") and not part else "+" if byte in b"+-" and part == "e" else None
