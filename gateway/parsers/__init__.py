"""What a model says, told apart: text for the user, reasoning before it, calls of tools.

A choice whose model neither reasons nor was given tools has no parser, and its text is content as it stands. Others
have one that is fed token by token, so that how tokens arrive changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.parsers.events import (
    Call,
    Content,
    Event,
    Reasoning,
    Refusal,
    Said,
    ToolArguments,
    ToolCallBegin,
    ToolInput,
    gathered,
)

__all__ = [
    "Call",
    "Content",
    "Event",
    "Parser",
    "Reasoning",
    "Refusal",
    "Said",
    "ToolArguments",
    "ToolCallBegin",
    "ToolInput",
    "gathered",
]


class Parser(Protocol):
    """Reads one answer."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Special tokens that mean something to it, by id. They have no text in an answer, and are fed as this."""

    @property
    def is_over(self) -> bool:
        """What follows is wanted by nobody: the worker may stop."""

    @property
    def num_calls(self) -> int:
        """That have begun."""

    @property
    def is_in_call(self) -> bool:
        """The call that began last is not whole."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Of those fed; the words around the reasoning are part of it."""

    def feed(self, text: str) -> None:
        """One token's text, perhaps empty: what a token completes."""

    def rest(self, text: str) -> None:
        """Text that no token is to be counted for: the end of what was held back."""

    def finish(self, is_cut: bool = False) -> None:
        """The answer has ended; what was held back is given out. ``is_cut``: by a limit or a stop string, so what has
        begun as a call, or as a word around one, would have become it, and is no text. A second time does nothing."""

    def take(self) -> list[Event]:
        """The events since the last call."""
