"""Texts that are too long for their model, found out without reading all of them.

A tokenizer takes seconds for a text of some megabytes, and a list of millions of token ids is made and let go in single
calls, in which no other thread runs. Text that is certainly too long is read no further than is needed to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Encoding, Tokenizer

from gateway.text.panics import as_errors

CHARS_A_TOKEN = 5
"""Prompts with fewer are read at once: most of them fit."""
PIECE_CHARS = 64 << 10
DOUBT = 0.02
"""Of the tokens that pieces have: a cut may make some more of them than the whole would have."""
DOUBTFUL_CHARS = 256
"""At the end of a piece: they may be read otherwise than in the whole."""


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


def beginnings(texts: Sequence[str], max_tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Of each text what has so many tokens. No more of it is read than is needed, and nothing ends close to a place
    where it was cut."""
    found, unfound, num_chars = list(texts), list(range(len(texts))), CHARS_A_TOKEN * max_tokens + DOUBTFUL_CHARS
    while unfound:
        pieces = [texts[number][:num_chars] for number in unfound]
        longer: list[int] = []
        with as_errors():
            encodings = tokenizer.encode_batch(pieces, add_special_tokens=False)
        for number, piece, encoding in zip(unfound, pieces, encodings, strict=True):
            end = encoding.offsets[max_tokens - 1][1] if len(encoding) > max_tokens else len(piece)
            if len(piece) == len(texts[number]) or end <= len(piece) - DOUBTFUL_CHARS:
                found[number] = piece[:end]
            else:
                longer.append(number)
        unfound, num_chars = longer, 2 * num_chars
    return found


def fitting(texts: Sequence[str], max_tokens: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of texts, at most so many of each: what there is too much of is taken from its end, before the special
    tokens that the tokenizer puts there."""
    begun = beginnings(texts, max_tokens, tokenizer)
    with as_errors():
        encodings = tokenizer.encode_batch(begun, add_special_tokens=True)
    return [without_end(encoding, max_tokens) for encoding in encodings]


def without_end(encoding: Encoding, max_tokens: int) -> list[int]:
    """At most so many of its token ids; those that lack are the last ones but for special tokens."""
    is_special = encoding.special_tokens_mask
    num_last = next((number for number, each in enumerate(reversed(is_special)) if not each), 0)
    num_last = min(num_last, max_tokens)
    at = len(encoding.ids) - num_last
    return [*encoding.ids[: min(at, max_tokens - num_last)], *encoding.ids[at:]]
