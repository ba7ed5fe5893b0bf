"""What an upstream said, on the way that a worker's deltas take: tokens as far as they can be counted, and their text.

An upstream gives text and no token ids, told apart into content, reasoning and calls already. So each token that is
counted has a word here instead of an id; what only counts, cuts or keeps tokens need not know the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.parsers import Content, Event, Reasoning, Refusal, ToolArguments, ToolCallBegin, ToolInput
from policies import wire
from policies.answers import Word
from policies.terms import Usage
from policies.upstreams.counting import CountedBy


class Counted(msgspec.Struct, frozen=True):
    """What a request used at an upstream."""

    usage: Usage
    by: CountedBy
    """Whose count it is."""


class Piece(wire.Delta, frozen=True, array_like=True, gc=False):
    """A delta of an upstream's; its ``token_ids`` say how many tokens there are, and nothing else."""

    words: list[Word] = msgspec.field(default_factory=list)
    """One for each token."""
    upstream: str = ""
    """Which one said it."""
    counted: Counted | None = None
    """With the end of the request's last sequence: of all of them together."""

    def first(self, num_tokens: int) -> dict[str, Any]:
        """The first tokens, as what takes the place of all of them."""
        return {"token_ids": self.token_ids[:num_tokens], "words": self.words[:num_tokens]}

    def rest(self, num_tokens: int) -> dict[str, Any]:
        """Those after them."""
        return {"token_ids": self.token_ids[num_tokens:], "words": self.words[num_tokens:]}


def events_of(words: Sequence[Word]) -> list[Event]:
    """What the words are to shapers."""
    events: list[Event] = []
    for word in words:
        match word.kind:
            case "content" if word.text:
                events.append(Content(word.text))
            case "reasoning" if word.text:
                events.append(Reasoning(word.text))
            case "refusal" if word.text:
                events.append(Refusal(word.text))
            case "call":
                events.append(ToolCallBegin(word.number, word.id, word.text))
            case "arguments" if word.text:
                events.append(ToolArguments(word.number, word.text))
            case "custom":
                events.append(ToolCallBegin(word.number, word.id, word.text, True))
            case "input" if word.text:
                events.append(ToolInput(word.number, word.text))
    return events
