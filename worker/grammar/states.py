"""What a JSON text may be in the middle of, and what counts of it: the states of worker.grammar.outline, each within
those that are open around it, and what is read within one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

OPEN_OBJECT = ord("{")
ESCAPE = ord("\\")
LEADS = bytes(
    0xC2 if byte < 0xE0 else 0xE1 if 0xE0 < byte < 0xF0 and byte != 0xED else 0xF1 if 0xF0 < byte < 0xF4 else byte
    for byte in range(256)
)
"""Of each byte that comes first in a character of several the one that asks for the same behind it."""
_DIGITS = frozenset(b"0123456789")
_Class = TypeVar("_Class")


class _Hashed:
    __slots__ = ("_hash",)
    _hash: int


@dataclass_transform(frozen_default=True)
def _state(cls: type[_Class]) -> type[_Class]:
    """A frozen dataclass whose hash is found once: those of all that is open around it are in it."""
    made = dataclass(frozen=True, slots=True)(cls)
    of: Callable[[object], object] = attrgetter(*[field.name for field in fields(made)])  # type: ignore[arg-type]

    def found(self: _Hashed) -> int:
        try:
            return self._hash
        except AttributeError:
            own = hash((cls.__name__, of(self)))
            object.__setattr__(self, "_hash", own)
            return own

    made.__hash__ = found  # type: ignore[method-assign,assignment]
    return made


@_state
class Value(_Hashed):
    """One is due."""

    schema: int
    above: Above
    num_blanks: int = 0


@_state
class Object(_Hashed):
    """Within an object."""

    schema: int
    above: Above
    names: tuple[bytes, ...] = ()
    last: int = OPEN_OBJECT
    """What it has come to: its opening, a name's quote, the colon and the value behind it, or a comma."""
    num_blanks: int = 0


@_state
class Name(_Hashed):
    """Of a property."""

    within: Object
    said: bytes = b""


@_state
class List(_Hashed):
    """Within an array."""

    schema: int
    above: Above
    num_values: int = 0
    """As far as it is counted."""
    is_open: bool = True
    """Nothing has come yet."""
    num_blanks: int = 0


@_state
class Text(_Hashed):
    """Whose length is all that counts."""

    schema: int
    above: Above
    num_chars: int = 0
    """As far as they are counted."""
    begun: bytes = b""
    """Of a character that is not whole: see ``char_after``."""


@_state
class Matching(_Hashed):
    """A text that has to match an expression."""

    pattern: str
    above: Above
    states: frozenset[int]


@_state
class Number(_Hashed):
    """Which has no bounds."""

    is_integer: bool
    above: Above
    part: str
    """See ``number_after``."""


@_state
class Short(_Hashed):
    """Another value."""

    above: Above
    said: bytes
    max_bytes: int


@_state
class Lost(_Hashed):
    """In a value of which nothing is known but where it ends."""

    above: Above
    num_levels: int = 0
    is_text: bool = False
    is_escaped: bool = False


@_state
class Over(_Hashed):
    """The value is whole, and only blanks may follow."""

    num_blanks: int = 0


Above = Object | List | None
State = Value | Object | Name | List | Text | Matching | Number | Short | Lost | Over
_State = TypeVar("_State", bound=State)


def changed(state: _State, field: str, value: object) -> _State:
    """As ``dataclasses.replace`` has it of one field, which takes many times as long."""
    made: Any = type(state)
    found: _State = made(*[value if each == field else getattr(state, each) for each in made.__match_args__])
    return found


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
    return LEADS[byte : byte + 1]


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
