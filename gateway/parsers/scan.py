"""JSON and fixed words, character by character: what an unfinished call is read with.

All are generators that are sent one character after another, so a text may be cut anywhere. Each is entered with the
character that it begins with. Those that say "exactly" end with their last character, the others return the first one
that is not theirs. Raises NotACall where the text is something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

MAX_HELD_CHARS = 32_768
"""Of a text that may become a call and has not yet."""
MAX_STRING_CHARS = 4096
"""Of a key or a name."""
SPACES = frozenset(" \t\r\n")
_HALF = re.compile("[\ud800-\udfff]")
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

T = TypeVar("T")
Read = Generator[None, str, T]


class NotACall(Exception):
    """What began like a call is none."""


def is_mark(char: str) -> bool:
    """Whether it stands for a special token (gateway/parsers/marks.py) and is no character of the text."""
    return "\ud800" <= char <= "\udfff"


def spaces(char: str) -> Read[str]:
    """The first character that is no space."""
    while char in SPACES:
        char = yield
    return char


def literal(text: str, char: str) -> Read[None]:
    """Exactly ``text``."""
    for i, wanted in enumerate(text):
        if i:
            char = yield
        if char != wanted:
            raise NotACall
    return None


def until(end: str, char: str, most: int = MAX_STRING_CHARS) -> Read[str]:
    """What comes before ``end``, which is read too; exactly."""
    text = char
    while not text.endswith(end):
        if len(text) > most:
            raise NotACall
        text += yield
    return text[: -len(end)]


def container(char: str, say: Callable[[str], None]) -> Read[None]:
    """An object or an array, exactly, as it is written; ``say`` is told each character."""
    if char not in "{[":
        raise NotACall
    depth, is_quoted, is_escaped = 0, False, False
    while True:
        if not is_mark(char):
            say(char)
        if is_quoted:
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"':
                is_quoted = False
        elif char == '"':
            is_quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if not depth:
                return None
        char = yield


def string(char: str, most: int = MAX_STRING_CHARS) -> Read[str]:
    """What a JSON string says, exactly; half characters, which no answer can tell, as U+FFFD."""
    if char != '"':
        raise NotACall
    raw, is_escaped = [char], False
    while True:
        char = yield
        if is_mark(char):
            continue
        raw.append(char)
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            break
        if len(raw) > most:
            raise NotACall
    try:
        said = json.loads("".join(raw), strict=False)
    except ValueError:
        raise NotACall from None
    assert isinstance(said, str)
    return _HALF.sub("\ufffd", said)


def scalar(char: str) -> Read[tuple[str, str]]:
    """A number, true, false or null; and the first character behind it."""
    text = ""
    while char in _SCALAR and len(text) < 64:
        text += char
        char = yield
    if not text:
        raise NotACall
    return text, char


def anything(char: str) -> Read[str]:
    """A value that nobody needs; the first character behind it."""
    if char == '"':
        yield from string(char, MAX_HELD_CHARS)
    elif char in "{[":
        yield from container(char, lambda _: None)
    else:
        _, char = yield from scalar(char)
        return char
    return (yield)
