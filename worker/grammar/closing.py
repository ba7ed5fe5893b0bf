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
"""Of one search: a tenth of a second at worst."""
_BRANCHES = 6
_TURN = 2
"""Tokens that a turn away from the likeliest way must save."""
_LONG_TOKENS = 64

_OPENING = b'{[,"'
_VALUES = (b",", b":", b"null", b"true", b"false", b"[]", b"{}", b'""', *(b"%d" % digit for digit in range(10)))
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
        self._structure = self._ids_of((*sorted(closing, key=len, reverse=True), *_VALUES, *_STARTS))
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
        if not len(_allowed(mask, self._telling)):
            found = _allowed(mask, self._structure)
        else:
            found = _allowed(mask, self._quotes)[:1]
            used = set(path)
            groups = [sorted(_allowed(mask, group), key=used.__contains__) for group in self._content]
            # Of each kind the first, then of each the second.
            found += [token_id for each in zip_longest(*(group[:_BRANCHES] for group in groups)) for token_id in each]
            found = [token_id for token_id in found if token_id is not None]
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


def find_end(matcher: LLMatcher, ends: Ends, max_tokens: int) -> list[int] | None:
    """At most so many tokens after which the answer is whole; None where none were found. ``matcher`` is left as it
    is."""
    if matcher.is_accepting():
        return []
    way = _Way(matcher.deep_copy())
    turns: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    num_turns, seen = 0, set[tuple[int, int]]()
    num_masks = 0
    while turns and num_masks < MAX_MASKS:
        _, _, path = heapq.heappop(turns)
        if not way.go(path):
            continue
        for mask in way.walk(ends, max_tokens):
            num_masks += 1
            state = hash(mask.tobytes()), len(way.path)
            if state in seen or num_masks > MAX_MASKS:
                break
            seen.add(state)
            first, *others = ends.likeliest(mask, way.path) or [-1]
            for place, token_id in enumerate(others, 1):
                num_turns += 1
                heapq.heappush(turns, (len(way.path) + _TURN * place, num_turns, [*way.path, token_id]))
            if first < 0 or not way.step([first]):
                break
        else:
            if way.is_whole and len(way.path) <= max_tokens:
                return way.path
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
