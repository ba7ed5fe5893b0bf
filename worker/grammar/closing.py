"""How an answer that must end soon can still become whole: a short row of tokens to its end, found by a search over the
masks of what may come next.

The search goes where an end is likely, closing marks first, and turns back where it has become too long; it may give up
early (it takes so many masks at most) and need not find the shortest end. What the grammar forces is not searched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

MAX_MASKS = 600
"""Of one search."""
_BRANCHES = 6
_TURN = 2
"""Tokens that a turn away from the likeliest way must save."""
_MAX_DIVE = 200
"""Choices in a row; whoever has not come to an end by then has lost its way."""
_LONG_TOKENS = 64

_OPENING = b'{[,"'
_VALUES = (b",", b":", b"null", b"true", b"false", b"[]", b"{}", b'""')
_STARTS = (b'"', b"n", b"t", b"f", b"-", b"[", b"{", b".")
_TELLING = bytes(byte for byte in range(0x41, 0x7B) if chr(byte).isalpha() and byte not in b"nulltruefalseE")
"""Letters that a JSON text has within strings only."""


class Ends:
    """The tokens of a vocabulary in the order in which an end is looked for."""

    def __init__(self, vocabulary: LLTokenizer, num_logits: int) -> None:
        by_bytes: dict[bytes, int] = {}
        most_opened = 0
        for token_id in range(min(num_logits, vocabulary.vocab_size)):
            if not vocabulary.is_special_token(token_id):
                token = vocabulary.decode_bytes([token_id])
                by_bytes.setdefault(token, token_id)
                most_opened = max(most_opened, num_opened(token))
        by_bytes.pop(b"", None)
        self.most_opened = most_opened
        """By one token, of what must be closed or filled."""
        self._by_bytes = by_bytes
        self._longest = max(map(len, by_bytes), default=0)
        closing = [token for token in by_bytes if set(token) <= set(b"]}")]
        quoted = [token for token in by_bytes if token[0] == 0x22 and set(token[1:]) <= set(b"]}")]
        plain = sorted((token for token in by_bytes if token.isalnum() and token.isascii()), key=len, reverse=True)
        marks = [bytes([byte]) for byte in range(0x20, 0x7F) if not chr(byte).isalnum() and byte not in b'"\\']
        letters = [bytes([byte]) for byte in range(0x20, 0x7F) if chr(byte).isalnum()]
        self._telling = self._ids_of(bytes([byte]) for byte in _TELLING)
        self._quotes = self._ids_of(sorted(quoted, key=len, reverse=True))
        self._structure = self._ids_of((*sorted(closing, key=len, reverse=True), *_VALUES))
        self._digits = self._ids_of(b"%d" % digit for digit in range(10))
        self._starts = self._ids_of(_STARTS)
        self._content = [self._ids_of(group) for group in (marks, plain[:_LONG_TOKENS], letters)]

    def _ids_of(self, tokens: Iterable[bytes]) -> npt.NDArray[np.int64]:
        return np.array([self._by_bytes[token] for token in tokens if token in self._by_bytes], dtype=np.int64)

    def spell(self, data: bytes) -> list[int]:
        """As few tokens as taking the longest each time makes; those before a byte that none begins with."""
        token_ids = []
        at = 0
        while at < len(data):
            end = min(len(data), at + self._longest)
            while end > at and data[at:end] not in self._by_bytes:
                end -= 1
            if end == at:
                break
            token_ids.append(self._by_bytes[data[at:end]])
            at = end
        return token_ids

    def likeliest(self, mask: npt.NDArray[np.uint32], path: list[int]) -> list[int]:
        """A few of the tokens that may come next, those first that lead to an end; what the path has already comes
        after what it has not."""
        used = set(path)
        if not len(_allowed(mask, self._telling)):
            found = _allowed(mask, self._structure) + sorted(_allowed(mask, self._digits), key=used.__contains__)
            found += _allowed(mask, self._starts)
        else:
            found = _allowed(mask, self._quotes)[:1]
            # Of each kind the first, then of each the second; each time another kind leads.
            turn = len(path) % len(self._content)
            kinds = [*self._content[turn:], *self._content[:turn]]
            groups = [sorted(_allowed(mask, kind), key=used.__contains__)[:_BRANCHES] for kind in kinds]
            found += [token_id for each in zip_longest(*groups) for token_id in each if token_id is not None]
        if not found:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits)[:_BRANCHES].tolist()
        return found[:_BRANCHES]


def _allowed(mask: npt.NDArray[np.uint32], ids: npt.NDArray[np.int64]) -> list[int]:
    """Of these tokens, in their order."""
    bits = (mask[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1
    allowed: list[int] = ids[bits.astype(bool)].tolist()
    return allowed


def num_opened(token: bytes) -> int:
    """How much a token may begin that has to be ended."""
    return sum(byte in _OPENING for byte in token)


def find_end(matcher: LLMatcher, ends: Ends, max_tokens: int, max_masks: int = MAX_MASKS) -> list[int] | None:
    """At most so many tokens after which the answer is whole; None where none were found. ``matcher`` is left as it
    is."""
    if matcher.is_accepting():
        return []
    way, turns, seen = _Way(matcher.deep_copy()), _Turns(), set[tuple[int, int]]()
    num_masks = 0
    path: list[int] | None = []
    while path is not None and num_masks < max_masks:
        num_dived = 0
        for mask in way.walk(ends, max_tokens) if way.go(path) else ():
            num_masks, num_dived = num_masks + 1, num_dived + 1
            state = hash(mask.tobytes()), len(way.path)
            if state in seen or num_masks > max_masks or num_dived > _MAX_DIVE:
                break
            seen.add(state)
            first, *others = ends.likeliest(mask, way.path) or [-1]
            turns.add(way.path, others)
            if first < 0 or not way.step([first]):
                break
        if way.is_whole and len(way.path) <= max_tokens:
            return way.path
        path = turns.next()
    return None


class _Turns:
    """Ways that were not gone. Now the shortest one comes next, now the longest: what was wrong was an early choice
    that led too far, or the last one, that led nowhere."""

    def __init__(self) -> None:
        self._paths: dict[int, list[int]] = {}
        self._num_added = 0
        self._shortest: list[tuple[int, int]] = []
        self._longest: list[tuple[int, int]] = []
        self._is_short = False

    def add(self, path: list[int], others: list[int]) -> None:
        """Any of the others behind the path, the likeliest first."""
        for place, token_id in enumerate(others, 1):
            self._num_added += 1
            self._paths[self._num_added] = [*path, token_id]
            heapq.heappush(self._shortest, (len(path) + _TURN * place, self._num_added))
            heapq.heappush(self._longest, (_TURN * place - len(path), self._num_added))

    def next(self) -> list[int] | None:
        self._is_short = not self._is_short
        heap = self._shortest if self._is_short else self._longest
        while heap:
            _, number = heapq.heappop(heap)
            path = self._paths.pop(number, None)
            if path is not None:
                return path
        return None


class _Way:
    """A matcher, and the tokens that it has taken since the search began."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.path: list[int] = []

    @property
    def is_whole(self) -> bool:
        return self._matcher.is_accepting()

    def go(self, path: list[int]) -> bool:
        """To there, from wherever it is."""
        num_common = 0
        for ours, theirs in zip(self.path, path, strict=False):
            if ours != theirs:
                break
            num_common += 1
        if len(self.path) > num_common:
            self._matcher.rollback(len(self.path) - num_common)
            del self.path[num_common:]
        return self.step(path[num_common:])

    def step(self, token_ids: list[int]) -> bool:
        """Whether all of them could be taken."""
        num = self._matcher.try_consume_tokens(token_ids)
        self.path += token_ids[:num]
        return num == len(token_ids)

    def walk(self, ends: Ends, max_tokens: int) -> Iterator[npt.NDArray[np.uint32]]:
        """The mask at each place where there is a choice, until the answer is whole or too long."""
        while not self.is_whole and len(self.path) < max_tokens:
            forced = ends.spell(self._matcher.compute_ff_bytes())
            if forced:
                if not self.step(forced):
                    return
                continue
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
            if self._matcher.is_error():
                return
            yield mask
