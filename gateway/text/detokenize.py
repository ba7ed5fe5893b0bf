"""Token ids back to text, a few at a time, never cutting a character.

Two kinds of tokenizer spell a token as bytes: byte-level BPE (GPT-2's, Radford et al. 2019) and SentencePiece with byte
fallback (Kudo and Richardson 2018). For both a table of each token's bytes is made at load, and decoding is a join and
an incremental UTF-8 decoder. The table is checked against the tokenizer's own decoder; where it disagrees, and for
other kinds, the tokenizer itself decodes the last few tokens again and again.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from policies.terms import MAX_VOCABULARY

_SAMPLES = (
    'The quick brown fox, 3.14 times;\n\tit\'s "fine".',
    "  leading and  double spaces ",
    "naïve façade, Größe, Москва, 東京, 한국어, العربية, עברית",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x[0] + {'a': 1}['a']\r\n",
)

_MAX_OPEN = 8
"""Tokens that are waited for until they are a character; none has so many."""


class Decoder(Protocol):
    """One sequence's tokens as text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an unfinished character wait for the rest."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never finished, else nothing."""
        ...


class Vocabulary:
    """Each token's own text, and decoders for sequences of them. Special tokens have no text in an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._names: dict[int, bytes] = {
            token_id: token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        table, self.strips_space = _table(tokenizer, self._names, self._specials)
        """Of a text the first space is dropped, as the tokenizer puts it there."""
        self._table: list[bytes] | None = table
        if table is not None and not self._agrees():
            self._table = None

    @property
    def added(self) -> dict[str, tuple[int, bool]]:
        """The tokens that were added to the model's vocabulary, by name: ids, and whether they are special."""
        return {name.decode(): (token_id, token_id in self._specials) for token_id, name in self._names.items()}

    @property
    def is_table(self) -> bool:
        """Whether the fast decoder is in use."""
        return self._table is not None

    def decoder(self, continues: bool) -> Decoder:
        """A decoder for one sequence. ``continues``: its text goes on from another text, so a SentencePiece tokenizer's
        first space belongs to it; otherwise it is dropped, as the tokenizer's own decoder does."""
        if self._table is None:
            return _WindowDecoder(self._tokenizer)
        return _TableDecoder(self._table, self.strips_space and not continues)

    def token_bytes(self, token_id: int) -> bytes:
        """The token by itself, for log-probabilities; a special one by its name, one that no text has as nothing."""
        if self._table is not None and token_id not in self._specials:
            return self._table[token_id] if token_id < len(self._table) else b""
        name = self._names.get(token_id)
        if name is not None:
            return name
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The token by itself; bytes that are no whole character as ``\\xNN``."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def _agrees(self) -> bool:
        """Whether the table decodes as the tokenizer does: samples whole, and tokens across the vocabulary one by
        one."""
        for token_ids in self._checks():
            decoder = self.decoder(continues=False)
            if decoder.feed(token_ids) + decoder.finish() != self._tokenizer.decode(token_ids):
                return False
        return True

    def _checks(self) -> Iterator[list[int]]:
        for sample in _SAMPLES:
            yield self._tokenizer.encode(sample, add_special_tokens=False).ids
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token_id in range(0, size, max(1, size // 1000)):
            yield [token_id]


class _TableDecoder:
    """Looks up each token's bytes."""

    __slots__ = ("_pending", "_strips_space", "_table")

    def __init__(self, table: list[bytes], strips_space: bool) -> None:
        self._table = table
        self._strips_space = strips_space
        self._pending = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        try:
            data = b"".join(map(table.__getitem__, token_ids))
        except IndexError:  # embeddings are often padded past the vocabulary; such a token has no text
            data = b"".join([table[token_id] for token_id in token_ids if token_id < len(table)])
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_bytes:]
        return text

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


class _WindowDecoder:
    """Decodes the last tokens with the new ones and without, for every other kind. (tokenizers' own ``DecodeStream``
    raises where a token changes what those before it said, as one behind an unfinished character does.)"""

    __slots__ = ("_before", "_known", "_new", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._known = ""
        """What these say by themselves."""
        self._new: list[int] = []
        """Tokens that have said nothing yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._one, token_ids))

    def finish(self) -> str:
        return self._said(self._whole())

    def _one(self, token_id: int) -> str:
        self._new.append(token_id)
        whole = self._whole()
        is_open = len(whole) <= len(self._known) or whole.endswith("\ufffd")
        return "" if is_open and len(self._new) <= _MAX_OPEN else self._said(whole)

    def _whole(self) -> str:
        return self._tokenizer.decode(self._before + self._new)

    def _said(self, whole: str) -> str:
        text = whole[len(self._known) :]
        self._before, self._new = self._new, []
        self._known = self._whole()
        return text


def _table(tokenizer: Tokenizer, names: dict[int, bytes], specials: frozenset[int]) -> tuple[list[bytes] | None, bool]:
    """Each token's bytes, and whether a text's first space is dropped; None for a kind of decoder not known here."""
    description = json.loads(tokenizer.to_str())
    decoder = description.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        spell, strips_space = _byte_level, False
    elif "ByteFallback" in kinds or kinds == ["Metaspace"]:
        spell, strips_space = _byte_fallback, _drops_first_space(steps)
    else:
        return None, False
    table = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= MAX_VOCABULARY:
            raise ValueError(f"a token of it has the id {token_id}, as none of any vocabulary has")
        if token_id >= len(table):  # ids may have gaps
            table += [b""] * (token_id + 1 - len(table))
        if token_id not in specials:
            # SentencePiece's decoder knows no added tokens: Gemma's for several spaces are spelled as the others are.
            table[token_id] = names[token_id] if token_id in names and spell is _byte_level else spell(token)
    return table, strips_space


def _drops_first_space(steps: list[dict[str, Any]]) -> bool:
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not spelled in this alphabet: it stands for itself
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as the characters from U+0100 on, in
    order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + i): byte for i, byte in enumerate(others)},
    }


_BYTE_OF = _byte_alphabet()
