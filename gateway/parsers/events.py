"""The pieces that an answer is made of, in the order in which the model says them; each dialect shapes the same ones.

A ``Choice`` (gateway/reply/choices.py) gives them out by ``take_events``, as often as a shaper asks: what is in between
two calls comes together. An answer without a parser has ``Content`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """More of the text for the user; never empty."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thought before it answers; never empty."""

    text: str


class Refusal(NamedTuple):
    """More of why there is no answer, where whoever says it tells that apart from the text; never empty."""

    text: str


class ToolCallBegin(NamedTuple):
    """A call of a tool. Its arguments follow, and end where the next one begins or the answer ends."""

    number: int
    """From 0, in order."""
    id: str
    name: str
    is_custom: bool = False
    """Its tool takes text: an input follows in place of arguments."""


class ToolArguments(NamedTuple):
    """More of the arguments of the call that began last, as JSON text; never empty."""

    number: int
    text: str


class ToolInput(NamedTuple):
    """More of the text that a custom tool is given by the call that began last; never empty."""

    number: int
    text: str


Event = Content | Reasoning | Refusal | ToolCallBegin | ToolArguments | ToolInput


class Call(NamedTuple):
    """A whole call; ``arguments`` is JSON text, or a custom tool's input, cut where the answer was cut."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False


class Said(NamedTuple):
    """A whole answer. ``content``, ``reasoning`` and ``refusal`` are None where nothing of the kind was
    said."""

    content: str | None
    reasoning: str | None
    calls: tuple[Call, ...]
    refusal: str | None = None

    @property
    def text(self) -> str:
        """For whoever makes no difference between an answer and a refusal."""
        return (self.content or "") + (self.refusal or "")


def gathered(events: Iterable[Event]) -> Said:
    """What the events add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    refusal: list[str] = []
    begun: list[ToolCallBegin] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case Refusal(text):
                refusal.append(text)
            case ToolCallBegin():
                begun.append(event)
                arguments.append([])
            case ToolArguments(number, text) | ToolInput(number, text):
                arguments[number].append(text)
    calls = tuple(
        Call(call.id, call.name, "".join(texts), call.is_custom) for call, texts in zip(begun, arguments, strict=True)
    )
    return Said("".join(content) or None, "".join(reasoning) or None, calls, "".join(refusal) or None)
