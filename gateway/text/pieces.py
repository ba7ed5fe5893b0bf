"""Tokenising a conversation piece by piece, and never the same piece twice.

A chat comes back with every turn, all it held before included, and begins with the same system prompt each time.
Special tokens cut it into pieces that the tokenizer reads independently of each other, so the pieces that were there
before need no second reading (as in SGLang's router, whose tokenizer cache ends its prefixes at special tokens).

A piece is remembered for one tenant alone: how fast an answer begins must not tell what somebody else asked.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from gateway.text.length import TooLong, check_length
from gateway.text.panics import as_errors
from gateway.text.words import Words

MAX_REMEMBERED_CHARS = 2 << 20
"""Of all pieces in one of two generations; with their token ids at most about 12 MB."""
MAX_TEMPLATE_CHARS = 32
"""Pieces no longer than this are mostly the template's own."""
MAX_PIECE_CHARS = 64 << 10
"""Longer pieces are documents; they would drive out everything else."""
MAX_READ_AT_ONCE = 1024
"""Pieces. The library's results are freed together, and no other thread runs meanwhile: where they are several hundred
thousand, which a body of 10 MB may have, every stream would stand still for half a second."""


_SAMPLES = (
    "{0}user\nhello, world{1}\n{0}assistant\n",
    "a{0}{1} a {0}  b\n\n{1}a{0}",
    "leading {0} text {1} 3.14 naïve 東京 🙂",
)


NUM_COMMON_WORDS = 10_000
"""As many as the library itself would remember; the lowest token ids are the commonest."""


def freeze_words(tokenizer: Tokenizer) -> None:
    """The library remembers the first words that it reads, whoever sent them, and reads them faster from then on:
    alone on a machine, that tells a secret somebody else used apart from one that nobody did 9 times in 10
    (benchmarks/cache_probe.md). Here it remembers the vocabulary's own words, and nothing that comes later."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is None:  # a kind of model that remembers nothing
        return
    common = range(min(tokenizer.get_vocab_size(), NUM_COMMON_WORDS))
    tokenizer.encode_batch_fast([tokenizer.decode([token_id]) for token_id in common], add_special_tokens=False)
    resize(0)  # keeps what is there


class Frame(NamedTuple):
    """What stood around the newest turn of a prompt: all until behind a special token, and all from the next one on."""

    before: str
    ids_before: list[int]
    behind: str
    ids_behind: list[int]


class Found(NamedTuple):
    """A prompt in pieces."""

    tenant_id: str
    known: list[array[int] | list[int] | None]
    """Token ids of each piece, or of several together, where they are remembered."""
    missing: list[str]
    """The pieces whose token ids are not."""


class Pieces:
    """One tokenizer's memory of pieces. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = Words.of(tokenizer)
        marks = _marks(tokenizer)
        self._marks = {content: array("I", [token_id]) for content, token_id in marks.items()}
        longest_first = sorted(marks, key=len, reverse=True)
        mark = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if marks else None
        self._cut = None if mark is None else mark.split
        self._next_mark = None if mark is None else mark.search
        # Two generations: what is used moves to the young one; when that is full it becomes the old one, which goes.
        self._young: dict[tuple[str, str], array[int]] = {}
        self._old: dict[tuple[str, str], array[int]] = {}
        self._num_chars = 0
        self._frames: dict[str, Frame] = {}
        """By tenant: of the last prompt of which all but one piece was known."""
        self._num_frame_chars = 0
        if self._cut is not None and not self._agrees(longest_first):
            self._cut = None

    def encode(self, prompt: str, tenant_id: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of ``prompt``, without the special tokens that the tokenizer would put around it.

        Raises what the tokenizer raises, and TooLong where there are more than ``max_tokens``; a few more may pass.
        """
        self.check_length(prompt, max_tokens)
        found = self.find(prompt, tenant_id)
        read: list[list[int]] = []
        for begin in range(0, len(found.missing), MAX_READ_AT_ONCE):
            read += self.read(found.missing[begin : begin + MAX_READ_AT_ONCE], max_tokens)
        return self.join(found, read)

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raises TooLong where ``text`` certainly has more tokens, and what the tokenizer raises."""
        if max_tokens is not None:
            check_length(text, max_tokens, self._num_tokens)

    def _num_tokens(self, text: str) -> int:
        with as_errors():
            return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def find(self, prompt: str, tenant_id: str) -> Found:
        """``prompt`` in pieces, some of them known."""
        if self._cut is None:
            return Found(tenant_id, [None], [prompt])
        marks, young, frame = self._marks, self._young, self._frames.get(tenant_id)
        if frame is not None and (newest := self._newest(prompt, frame)):
            token_ids = young.get((tenant_id, newest)) or self._recall((tenant_id, newest))
            return Found(
                tenant_id, [frame.ids_before, token_ids, frame.ids_behind], [newest] if token_ids is None else []
            )
        pieces = [piece for piece in self._cut(prompt) if piece]
        known = [
            marks.get(piece) or young.get((tenant_id, piece)) or self._recall((tenant_id, piece)) for piece in pieces
        ]
        missing = [piece for piece, token_ids in zip(pieces, known, strict=True) if token_ids is None]
        if len(missing) == 1:
            self._keep_frame(tenant_id, pieces, known)
        return Found(tenant_id, [*known], missing)

    def _newest(self, prompt: str, frame: Frame) -> str:
        """What this frame stands around, if it is one piece: the special token that comes next is the frame's. No
        special token is a part of another one, so both sides are cut as they were."""
        if not (prompt.startswith(frame.before) and prompt.endswith(frame.behind)):
            return ""
        assert self._next_mark is not None
        begin, end = len(frame.before), len(prompt) - len(frame.behind)
        mark = self._next_mark(prompt, begin)
        return prompt[begin:end] if mark is not None and mark.start() == end else ""

    def _keep_frame(self, tenant_id: str, pieces: list[str], known: list[array[int] | None]) -> None:
        """Of pieces of which one alone is not known, and stands between two special tokens."""
        place = known.index(None)
        before, behind = "".join(pieces[:place]), "".join(pieces[place + 1 :])
        num_chars = len(before) + len(behind)
        if not before or not behind or num_chars > MAX_PIECE_CHARS:
            return
        if self._num_frame_chars + num_chars > MAX_REMEMBERED_CHARS:
            self._frames, self._num_frame_chars = {}, 0
        self._num_frame_chars += num_chars
        self._frames[tenant_id] = Frame(before, _joined(known[:place]), behind, _joined(known[place + 1 :]))

    def read_plain(self, texts: list[str]) -> list[list[int]] | None:
        """Token ids of each text, without the tokenizer; None where one of them needs it."""
        if self._words is None:
            return None
        read = []
        for text in texts:
            token_ids = self._words.read(text)
            if token_ids is None:
                return None
            read.append(token_ids)
        return read

    def read(self, texts: Sequence[str], max_tokens: int | None = None, with_specials: bool = False) -> list[list[int]]:
        """Token ids of each text, by the tokenizer. Raises what it raises, and TooLong where one text has more than
        ``max_tokens``."""
        # This variant keeps no character offsets and, unlike encode(), lets other threads run.
        with as_errors():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=with_specials)
        if max_tokens is not None and (longest := max(map(len, encodings), default=0)) > max_tokens:
            raise TooLong(longest, max_tokens)
        return [encoding.ids for encoding in encodings]

    def join(self, found: Found, read: list[list[int]]) -> list[int]:
        """The whole, with ``read`` in the place of what was missing; it is remembered."""
        whole: list[int] = []
        num_read = 0
        for known in found.known:
            if known is None:
                whole += read[num_read]
                num_read += 1
            else:
                whole += known
        is_newest = True
        for text, token_ids in zip(reversed(found.missing), reversed(read), strict=True):
            # The newest turn is remembered when it comes back as history, as most conversations have but one.
            if is_newest and len(text) > MAX_TEMPLATE_CHARS:
                is_newest = False
            else:
                self._remember((found.tenant_id, text), array("I", token_ids))
        return whole

    def _recall(self, key: tuple[str, str]) -> array[int] | None:
        """Out of the older generation."""
        token_ids = self._old.get(key)
        if token_ids is not None:
            self._remember(key, token_ids)
        return token_ids

    def _remember(self, key: tuple[str, str], token_ids: array[int]) -> None:
        num_chars = sum(map(len, key))
        if num_chars > MAX_PIECE_CHARS:
            return
        if self._num_chars + num_chars > MAX_REMEMBERED_CHARS:
            self._old, self._young, self._num_chars = self._young, {}, 0
        self._young[key] = token_ids
        self._num_chars += num_chars

    def _agrees(self, marks: list[str]) -> bool:
        """Whether pieces read alone are the same as at once: some tokenizers treat the very first word apart."""
        samples = [sample.format(marks[0], marks[-1]) for sample in _SAMPLES]
        return all(self.encode(sample, "") == self.read([sample])[0] for sample in samples)


def _joined(pieces: Iterable[array[int] | None]) -> list[int]:
    return [token_id for token_ids in pieces if token_ids is not None for token_id in token_ids]


def _marks(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens that cut a text wherever they stand, whatever stands beside them."""
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    parts = _parts([token.content for token in added.values()])
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and token.content not in parts
    }


def _parts(contents: Sequence[str]) -> set[str]:
    """Those that are in another one, or there twice. Some models have tens of thousands, so they are not held against
    each other: what is cut out of each, as long as any is, is looked up."""
    known = Counter(contents)
    found = {content for content, times in known.items() if times > 1}
    lengths = sorted(set(map(len, known)))
    for content in known:
        for length in takewhile(len(content).__gt__, lengths):
            cut = (content[at : at + length] for at in range(len(content) - length + 1))
            found.update(filter(known.__contains__, cut))
    return found
