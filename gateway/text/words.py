"""Plain words, read without the tokenizer.

A byte-level BPE tokenizer cuts a text into words by a regular expression and reads each of them by itself. Most words
of a text are tokens of the vocabulary, so for plain ASCII Python's own ``re`` and one look-up a word say the same, in a
quarter of the time that the library takes for a short prompt (benchmarks/gateway.md). Whatever is not plain, or of a
kind of tokenizer that is not known here, is left to the library.

The table holds the vocabulary's own words and never grows, so nothing here tells what somebody else asked.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

MAX_WORDS = 10_000
"""In the table: the lowest token ids are the commonest."""
MAX_RARE_SHARE = 0.25
"""Of a text's words: with more of them that are not in the table, the library is faster."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel cuts by on its own (Radford et al. 2019)."""
_ASCII_CLASSES = {"L": "A-Za-z", "N": "0-9"}
_UNCHANGED_BY_ASCII = {None, "NFC", "NFD", "NFKC", "NFKD"}
"""Normalisers that leave ASCII as it is."""
_SAMPLES = (
    'The quick brown fox, 3.14 times;\n\tit\'s "fine".',
    "  leading and  double spaces, and more at the end   ",
    "user\n\n\n  I'LL we'Ve\r\n\r\n x=f(y)[0]+{'a':1}; 1234567 #!? \t \n ",
    "\x00\x1c\x1f \x0b\x0c\x7f~`^_a_b",
)


class Words:
    """One byte-level BPE tokenizer's words."""

    def __init__(self, tokenizer: Tokenizer, cut: re.Pattern[str], names: list[str]) -> None:
        """``names``: of the tokens that the tokenizer finds before it cuts a text into words."""
        self._cut = cut.findall
        self._model = tokenizer.model
        self._has_name = re.compile("|".join(map(re.escape, names))).search if names else None
        self._table: dict[str, int] = {}
        for token_id in range(min(tokenizer.get_vocab_size(with_added_tokens=False), MAX_WORDS)):
            word = tokenizer.decode([token_id])
            if word.isascii() and self._cut(word) == [word] and self._spelled(word) == [token_id]:
                self._table[word] = token_id

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words | None:
        """None where the tokenizer is of another kind."""
        description = json.loads(tokenizer.to_str())
        pattern = _pattern_of(description)
        cut = None if pattern is None else _ascii(pattern)
        if cut is None:
            return None
        words = cls(tokenizer, cut, [token["content"] for token in description["added_tokens"]])
        agrees = all(
            words._whole(sample, share=1.0) == tokenizer.encode(sample, add_special_tokens=False).ids
            for sample in _SAMPLES
        )
        return words if agrees else None

    def read(self, text: str) -> list[int] | None:
        """Token ids of ``text``; None where the library has to read it."""
        if not text.isascii() or (self._has_name is not None and self._has_name(text)):
            return None
        return self._whole(text, MAX_RARE_SHARE)

    def _whole(self, text: str, share: float) -> list[int] | None:
        words = self._cut(text)
        if "".join(words) != text:  # the expression leaves something out
            return None
        token_ids: list[Any] = list(map(self._table.get, words))
        num_rare = token_ids.count(None)
        if num_rare > share * len(words):
            return None
        place = num_more = 0
        for _ in range(num_rare):
            place = token_ids.index(None, place)
            spelled = self._spelled(words[place - num_more])
            token_ids[place : place + 1] = spelled
            num_more += len(spelled) - 1
        return token_ids

    def _spelled(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word.translate(_SPELLING))]


def _pattern_of(description: dict[str, Any]) -> str | None:
    """The expression that cuts a text into words; None where more is done to a text than that."""
    normalizer, before = description.get("normalizer"), description.get("pre_tokenizer") or {}
    if description["model"].get("type") != "BPE" or (normalizer or {}).get("type") not in _UNCHANGED_BY_ASCII:
        return None
    match before:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern
    return None


def _ascii(pattern: str) -> re.Pattern[str] | None:
    """Oniguruma's expression as one that cuts ASCII alike; None where it has anything that might mean something else
    to ``re``."""
    parts: list[str] = []
    in_class = False
    for part in re.findall(r"\\p\{\w+\}|\\.|\[\^?|.", pattern, re.DOTALL):
        if part.startswith("\\p{"):
            chars = _ASCII_CLASSES.get(part[3:-1])
            if chars is None:
                return None
            part = chars if in_class else f"[{chars}]"
        elif part.startswith("["):
            if in_class:
                return None
            in_class = True
        elif part == "]":
            in_class = False
        elif re.fullmatch(r"\\[^sSrntdw'.?*+|()\[\]{}\\/-]|[$^&]", part):
            return None
        parts.append(part)
    try:
        cut = re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
    return cut if cut.groups == 0 else None


def _ascii_spelling() -> dict[int, str]:
    """GPT-2's characters for the bytes that are not printable: U+0100 and on, in order."""
    others = [byte for byte in range(0x80) if not 0x21 <= byte <= 0x7E]
    return {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_SPELLING: dict[int, Any] = _ascii_spelling()
