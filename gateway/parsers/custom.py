"""Custom tools: a model writes their calls as any others, with one argument, a string, and a client gets the text.

What is not written that way is told as it stands, so that whoever runs the tool sees what the model said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.parsers import Parser
from gateway.parsers.events import Event, ToolArguments, ToolCallBegin, ToolInput

ARGUMENT = "input"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string"}},
    "required": [ARGUMENT],
    "additionalProperties": False,
}
"""What the arguments of a custom tool are to a model."""
MAX_HEAD_CHARS = 1024
"""Of what comes before the text; no more of it is held."""
_HEAD = ("{", f'"{ARGUMENT}"', ":", '"')
_NOTHING = re.compile(r"\s*\{\s*\}\s*")
_PIECE = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]', re.DOTALL)
_CUT = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_REPLACED = "\ufffd"


class Customs:
    """A ``Parser`` that reads by another one."""

    def __init__(self, parser: Parser, names: frozenset[str]) -> None:
        """``names``: of the custom tools."""
        self._parser = parser
        self._names = names
        self._input: Input | None = None
        """Of the call that began last, where that is one of a custom tool."""

    @property
    def marks(self) -> Mapping[int, str]:
        return self._parser.marks

    @property
    def is_over(self) -> bool:
        return self._parser.is_over

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def is_in_call(self) -> bool:
        return self._parser.is_in_call

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def feed(self, text: str) -> None:
        self._parser.feed(text)

    def rest(self, text: str) -> None:
        self._parser.rest(text)

    def finish(self, is_cut: bool = False) -> None:
        self._parser.finish(is_cut)

    def take(self) -> list[Event]:
        events: list[Event] = []
        for event in self._parser.take():
            match event:
                case ToolCallBegin(name=name):
                    is_custom = name in self._names
                    self._input = Input() if is_custom else None
                    events.append(event._replace(is_custom=is_custom))
                case ToolArguments(number, text) if self._input is not None:
                    if said := self._input.feed(text):
                        events.append(ToolInput(number, said))
                case _:
                    events.append(event)
        return events


class Input:
    """The string in ``{"input": "..."}``, as it comes."""

    def __init__(self) -> None:
        self._held = ""
        self._high = ""
        """The first half of a character that JSON writes as two."""
        self._read: Callable[[], str] = self._head

    def feed(self, text: str) -> str:
        """More of the arguments; what they add to the input."""
        self._held += text
        return self._read()

    def _head(self) -> str:
        rest = self._held
        for word in _HEAD:
            rest = rest.lstrip()
            if not rest.startswith(word):
                if word.startswith(rest) and len(self._held) <= MAX_HEAD_CHARS:
                    return ""
                self._read = self._nothing if _NOTHING.fullmatch(self._held) else self._as_it_stands
                return self._read()
            rest = rest[len(word) :]
        self._held, self._read = rest, self._string
        return self._string()

    def _string(self) -> str:
        text, at = self._held, 0
        said: list[str] = []
        while at < len(text):
            if text[at] == '"':
                said.append(self._whole(""))
                self._read = self._nothing
                at = len(text)
            elif (piece := _PIECE.match(text, at)) is not None:
                said.append(self._whole(_said(piece[0])))
                at = piece.end()
            elif _CUT.fullmatch(text, at):
                break
            else:  # a backslash that begins nothing says itself
                said.append(self._whole("\\"))
                at += 1
        self._held = text[at:]
        return "".join(said)

    def _whole(self, text: str) -> str:
        """With no half characters in it; the first half is kept for the second."""
        high, self._high = self._high, ""
        if high and "\udc00" <= text[:1] <= "\udfff":
            return (high + text).encode("utf-16", "surrogatepass").decode("utf-16")
        before = _REPLACED if high else ""
        if "\ud800" <= text[:1] <= "\udbff":
            self._high = text
            return before
        return before + (_REPLACED if "\udc00" <= text[:1] <= "\udfff" else text)

    def _nothing(self) -> str:
        self._held = ""
        return ""

    def _as_it_stands(self) -> str:
        text, self._held = self._held, ""
        return text


def _said(piece: str) -> str:
    """By one piece of a JSON string; an escape that is none says itself."""
    if not piece.startswith("\\"):
        return piece
    try:
        said = json.loads(f'"{piece}"')
    except ValueError:
        return piece
    assert isinstance(said, str)
    return said
