"""How far each token goes on with what an answer is in the middle of: blanks between the parts of a JSON text, or the
characters of one of its texts, one that has begun or is being escaped among them.

Where a grammar has room for so many more of them, those tokens may come that may where it has room for more, but for
the longer ones: one mask serves, however many there have been.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from worker.sampling.masks import Words

BLANKS = b" \t\n\r"
_UNKNOWN = 0xFFFF
_MANY = 64
"""Masks by lengths that are made before they are needed: there they would be in everybody's way."""
_WITHIN = re.compile(rb'(?:[^"\\]|\\(?:u[0-9a-fA-F]{0,4}|[^u]|$))*', re.DOTALL)
"""What of a token is in the text that it is added to."""
_ESCAPED = re.compile(rb"\\(?:u[0-9a-fA-F]{0,4}|[^u]|$)", re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Of a character."""
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')
_MOST_PLAIN = 0xFF
_LATER = bytes(range(0x80, 0xC0))
"""Bytes that do not come first in a character."""


class Lengths:
    """Of all tokens, in one of these."""

    def __init__(self, each: npt.NDArray[np.uint16]) -> None:
        self._each = each
        known = each[each != _UNKNOWN]
        self.longest = int(known.max(initial=0))
        self._unknown = _bits(each == _UNKNOWN)
        self._up_to = {length: _bits(each <= length) for length in range(min(self.longest, _MANY))}

    def are_known(self, mask: Words) -> bool:
        """Of all tokens in a mask."""
        return not (mask & self._unknown).any()

    def up_to(self, length: int) -> Words:
        """A mask of the tokens that are no longer."""
        found = self._up_to.get(length)
        if found is None:
            found = self._up_to[length] = _bits(self._each <= length)
        return found


class Counted(NamedTuple):
    """Of one vocabulary."""

    most_commas: int
    """Of one token."""
    blanks: Lengths
    chars: Lengths
    escaped: Lengths
    """Characters, behind a backslash."""
    singles: dict[int, int]
    """Tokens by the byte that they are."""
    plain: bytes
    """Of each token how many characters it is, if they are all such as any text may have as they are; else 0."""

    @classmethod
    def of(cls, vocabulary: LLTokenizer) -> Counted:
        num_tokens = vocabulary.vocab_size
        most_commas, blanks, chars = 0, np.zeros(num_tokens, np.uint16), np.zeros(num_tokens, np.uint16)
        escaped = np.full(num_tokens, _UNKNOWN, np.uint16)
        singles: dict[int, int] = {}
        plain = bytearray(num_tokens)
        for token_id in range(num_tokens):
            text = vocabulary.decode_bytes([token_id])
            most_commas = max(most_commas, text.count(b","))
            # A special token says nothing of what it is called.
            if text and not vocabulary.is_special_token(token_id):
                blanks[token_id] = len(text) - len(text.lstrip(BLANKS))
                chars[token_id] = num_chars = _num_chars(text)
                # Those without a name are called so.
                if len(text) <= _MOST_PLAIN and not text.translate(None, _PLAIN) and text != b"<[%d]>" % token_id:
                    plain[token_id] = len(text)
                if len(text) == 1:
                    singles.setdefault(text[0], token_id)
                if text[0] in b"/bfnrt":
                    # One character in any case.
                    escaped[token_id] = num_chars
                elif text[0] in b'"\\u':
                    escaped[token_id] = _num_chars(b"\\" + text if text[0] == ord("u") else b"x" + text[1:])
        return cls(most_commas, Lengths(blanks), Lengths(chars), Lengths(escaped), singles, bytes(plain))


def _num_chars(text: bytes) -> int:
    """Of a text that goes on with this, from the beginning of a character; one that is not whole counts."""
    if b"\\" in text:
        if _HALF.search(text):
            return _UNKNOWN
        found = _WITHIN.match(text)
        assert found is not None
        text = _ESCAPED.sub(b"x", found[0])
    return len(text.partition(b'"')[0].translate(None, _LATER))


def _bits(is_in: npt.NDArray[np.bool_]) -> Words:
    num_words = -(-len(is_in) // 32)
    packed = np.zeros(4 * num_words, np.uint8)
    packed[: -(-len(is_in) // 8)] = np.packbits(is_in, bitorder="little")
    return packed.view(np.int32)
