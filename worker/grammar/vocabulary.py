"""A model's tokens as llguidance sees them: read from the tokenizer's own description, or from a GGUF file's.

The bytes of each token are all that a grammar needs. How the tokenizer itself would cut a text matters for guesses
only, so what llguidance cannot read for itself is put together here, and cuts texts greedily.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from policies.gguf import GgufInvalid, Header, parse
from policies.terms import MAX_VOCABULARY
from sources import content
from worker.grammar.errors import NoVocabulary

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file."""
_MAX_TEXTS = 4096
"""Whose tokens are remembered."""
_SPECIAL = b"\xff"
"""With this, llguidance has the name of a special token begin."""


def read_vocabulary(path: Path, num_logits: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Of the model in a directory in Hugging Face layout, or in a GGUF file; it has at least ``num_logits`` tokens,
    those without a name among them, which no answer has. Raises NoVocabulary.
    """
    # It insists on an end token; where there is none, one that has no logit does no harm.
    ends = sorted(eos_token_ids) or [num_logits]
    try:
        if path.is_file():
            return made(_gguf_tokens(path), num_logits, ends)
        text = content(path / "tokenizer.json").decode()
        description = json.loads(text)
        num_tokens = max((num_logits, *(token_id + 1 for token_id in _ids(description)), *(end + 1 for end in ends)))
        if num_tokens > MAX_VOCABULARY:
            raise ValueError(f"a token of it has the id {num_tokens - 1}")
        try:
            return LLTokenizer(text, n_vocab=num_tokens, eos_token=ends)
        except ValueError:
            return made(tokens_of(description), num_logits, ends)
    except (OSError, ValueError, GgufInvalid, LookupError, TypeError, AttributeError) as error:
        raise NoVocabulary(f"its tokenizer cannot be read for grammars: {str(error)[:300]}") from error


def marks_of(vocabulary: LLTokenizer) -> frozenset[str]:
    """What its special tokens are called."""
    return frozenset(vocabulary.decode_bytes([each]).decode(errors="replace") for each in _specials(vocabulary))


def without_marks(vocabulary: LLTokenizer) -> LLTokenizer:
    """The same tokens; but where a text says what a special token is called, it is a text. It cuts texts greedily."""
    specials = set(_specials(vocabulary))
    tokens = {
        token_id: (_SPECIAL if token_id in specials else b"") + vocabulary.decode_bytes([token_id])
        for token_id in range(vocabulary.vocab_size)
        if token_id in specials or not vocabulary.is_special_token(token_id)
    }
    return made(tokens, vocabulary.vocab_size, vocabulary.eos_tokens)


def _specials(vocabulary: LLTokenizer) -> list[int]:
    """Those that have names."""
    return [
        token_id
        for token_id in range(vocabulary.vocab_size)
        if vocabulary.is_special_token(token_id) and vocabulary.decode_bytes([token_id]) != b"<[%d]>" % token_id
    ]


def spelt(path: Path) -> dict[int, bytes]:
    """The bytes of each token of such a model, none where its tokenizer cannot be read; special ones are marked."""
    try:
        if path.is_file():
            return _gguf_tokens(path)
        return tokens_of(json.loads(content(path / "tokenizer.json").decode()))
    except (OSError, ValueError, GgufInvalid, LookupError, TypeError, AttributeError):
        return {}


def made(tokens: dict[int, bytes], num_logits: int, ends: Sequence[int]) -> LLTokenizer:
    """Of tokens by id, and those of them that end an answer; it cuts texts greedily."""
    num_tokens = max(num_logits, *(token_id + 1 for token_id in (*tokens, *ends)))
    return LLTokenizer(
        TokenizerWrapper(_Greedy([tokens.get(i, b"") for i in range(num_tokens)], ends)), eos_token=list(ends)
    )


class _Greedy:
    """What llguidance asks of a tokenizer that it does not know: always the longest token that fits."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: Sequence[int]) -> None:
        self.tokens, self.eos_token_id = tokens, ends[0]
        self.special_token_ids = [i for i, token in enumerate(tokens) if token.startswith(_SPECIAL)]
        self._ids = {token: i for i, token in enumerate(tokens) if token and not token.startswith(_SPECIAL)}
        self._longest = max(map(len, self._ids), default=0)
        # A grammar forces the same few texts again and again.
        self._known = lru_cache(_MAX_TEXTS)(self._cut)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._known(text.encode() if isinstance(text, str) else text)

    def _cut(self, data: bytes) -> list[int]:
        token_ids: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token_id = self._ids.get(data[at:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    break
            else:
                return token_ids  # no token says this byte
            at = end
        return token_ids


# tokenizer.json


def _ids(description: dict[str, Any]) -> Iterable[int]:
    vocabulary = description["model"]["vocab"]
    yield len(vocabulary) - 1
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    yield from (added["id"] for added in description.get("added_tokens") or ())


def tokens_of(description: dict[str, Any]) -> dict[int, bytes]:
    """The bytes of each token, as tokenizer.json describes it. Raises ValueError, or whatever one that is none leads
    to."""
    vocabulary = description["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((each[0], i) for i, each in enumerate(vocabulary))
    steps = json.dumps([description.get("decoder"), description.get("pre_tokenizer")])
    if '"ByteLevel"' in steps:
        spell = _byte_level
    elif '"ByteFallback"' in steps or '"Metaspace"' in steps:
        spell = _sentence_piece
    else:
        raise ValueError("it spells tokens neither as bytes nor as SentencePiece does")
    tokens = {token_id: spell(token) for token, token_id in pairs}
    for added in description.get("added_tokens") or ():
        tokens[added["id"]] = _named(added["content"], added.get("special", False))
    return tokens


def _named(name: str, is_special: bool) -> bytes:
    """As llguidance does itself: what looks like a mark is one, so that grammars may ask for it by name."""
    is_mark = is_special or re.fullmatch(r"<.+>", name) is not None
    return (_SPECIAL if is_mark else b"") + name.encode()


# GGUF


def _gguf_tokens(path: Path) -> dict[int, bytes]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return _described(parse(view))


def _described(header: Header) -> dict[int, bytes]:
    spells = {"gpt2": _byte_level, "llama": _sentence_piece}
    spell = spells.get(header.text("tokenizer.ggml.model"))
    if spell is None:
        raise GgufInvalid("it spells tokens neither as bytes nor as SentencePiece does")
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type")
    return {
        i: _named(token, kind == _CONTROL) if kind in (_CONTROL, _USER_DEFINED) else spell(token)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    }


# How tokens spell bytes


def _sentence_piece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_level(token: str) -> bytes:
    """GPT-2's alphabet: printable bytes as themselves, the others as the characters from U+0100 on."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # not spelled in this alphabet: it stands for itself
        return token.encode()


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
