"""Words that a model writes as one token, and that mean something beside the text.

A special token has no text in an answer. For a parser it is written as a character that no text has, a lone surrogate:
nothing that a model writes in ordinary tokens can be taken for it. A word that is no special token is found in the text
as it is spelled, whichever tokens it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_FIRST = 0xD800
_MARK = re.compile("[\ud800-\udfff]")


class Marks(NamedTuple):
    """The words of one parser in one vocabulary."""

    spelled: Mapping[str, str]
    """Each as it occurs in the text that a parser is fed."""
    by_id: Mapping[int, str]
    """What it is fed for a special token."""


def marks_of(words: Iterable[str], specials: Mapping[str, int]) -> Marks:
    """``specials``: the vocabulary's special tokens, by name."""
    spelled: dict[str, str] = {}
    by_id: dict[int, str] = {}
    for number, word in enumerate(dict.fromkeys(words)):
        token_id = specials.get(word)
        spelled[word] = word if token_id is None else chr(_FIRST + number)
        if token_id is not None:
            by_id[token_id] = spelled[word]
    return Marks(spelled, by_id)


def without_marks(text: str) -> str:
    """What of it is text."""
    return _MARK.sub("", text)
