"""Texts that are too long for their model, found out without reading all of them.

A tokenizer takes seconds for a text of some megabytes, and a list of millions of token ids is made and let go in single
calls, in which no other thread runs. Text that is certainly too long is read no further than is needed to know it.
"""

from __future__ import annotations

from collections.abc import Callable

CHARS_A_TOKEN = 5
"""Prompts with fewer are read at once: most of them fit."""
PIECE_CHARS = 64 << 10
DOUBT = 0.02
"""Of the tokens that pieces have: a cut may make some more of them than the whole would have."""


class TooLong(Exception):
    """There are at least so many tokens, which are too many."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(num_tokens, max_tokens)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


def check_length(text: str, max_tokens: int, count: Callable[[str], int]) -> None:
    """Raises TooLong where ``text`` has more than ``max_tokens`` beyond doubt; ``count``: tokens of a piece. What
    passes may be too long."""
    if len(text) <= CHARS_A_TOKEN * max_tokens:
        return
    num_tokens = 0
    for begin in range(0, len(text), PIECE_CHARS):
        num_tokens += count(text[begin : begin + PIECE_CHARS])
        if (certain := int(num_tokens * (1 - DOUBT))) > max_tokens:
            raise TooLong(certain, max_tokens)
