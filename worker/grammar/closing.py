"""How an answer that must end soon can still become whole: a short row of tokens to its end, found by a search over the
masks of what may come next.

The search goes where an end is likely, closing marks first, and turns back where it has become too long; it may give up
early (it takes so many masks at most) and need not find the shortest end. What the grammar forces is not searched.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, groupby, zip_longest

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from policies.expressions import Expression
from worker.grammar.scan import Scan

MAX_MASKS = 600
"""Of one search."""
_BRANCHES, _MOST_BRANCHES = 6, 64
"""Ways from a place that are gone, the likeliest first; where no more than these may come, as where one of a few words
begins, all of them."""
_TURN = 2
"""Tokens that a turn away from the likeliest way must save."""
_MAX_DIVE = 200
"""Choices in a row; whoever has not come to an end by then has lost its way."""
_LONG_TOKENS = 64

_BYTES = (*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""That JSON texts are made of."""
_VALUES = (b",", b":", b"null", b"true", b"false", b"[]", b"{}", b'""')
_STARTS = (b'"', b"n", b"t", b"f", b"-", b"[", b"{", b".")
_TELLING = bytes(byte for byte in range(0x41, 0x7B) if chr(byte).isalpha() and byte not in b"nulltruefalseE")
"""Letters that a JSON text has within strings only."""


class TookTooLong(Exception):
    """More CPU than a search may take."""


class Ends:
    """The tokens of a vocabulary in the order in which an end is looked for."""

    def __init__(self, vocabulary: LLTokenizer, num_logits: int) -> None:
        by_bytes: dict[bytes, int] = {}
        most_levels = 0
        for token_id in range(min(num_logits, vocabulary.vocab_size)):
            if not vocabulary.is_special_token(token_id):
                token = vocabulary.decode_bytes([token_id])
                by_bytes.setdefault(token, token_id)
                most_levels = max(most_levels, token.count(b"{") + token.count(b"["))
        by_bytes.pop(b"", None)
        self.most_levels = most_levels
        """Lists and objects that one token may open."""
        self.spells_bytes = all(bytes([byte]) in by_bytes for byte in _BYTES)
        """Whatever is left of an answer takes no more tokens than bytes."""
        self._vocabulary = vocabulary
        self._by_bytes = by_bytes
        self._longest = max(map(len, by_bytes), default=0)
        closing = [token for token in by_bytes if set(token) <= set(b"]}")]
        quoted = [token for token in by_bytes if token[0] == 0x22 and set(token[1:]) <= set(b"]}")]
        plain = sorted((token for token in by_bytes if token.isalnum() and token.isascii()), key=len, reverse=True)
        marks = [bytes([byte]) for byte in range(0x20, 0x7F) if not chr(byte).isalnum() and byte not in b'"\\']
        letters = [bytes([byte]) for byte in range(0x20, 0x7F) if chr(byte).isalnum()]
        groups = [
            self._ids_of(group)
            for group in (
                (bytes([byte]) for byte in _TELLING),
                sorted(quoted, key=len, reverse=True),
                (*sorted(closing, key=len, reverse=True), *_VALUES),
                (b"%d" % digit for digit in range(10)),
                _STARTS,
                marks,
                plain[:_LONG_TOKENS],
                letters,
            )
        ]
        self._groups = [(len(group), group) for group in groups]
        ids = np.array([token_id for group in groups for token_id in group], dtype=np.int64)
        self._words, self._bits = ids >> 5, (ids & 31).astype(np.uint32)
        """Where a mask has them, one group after the other."""

    def _ids_of(self, tokens: Iterable[bytes]) -> list[int]:
        return [self._by_bytes[token] for token in tokens if token in self._by_bytes]

    def _allowed(self, mask: npt.NDArray[np.uint32]) -> Iterator[list[int]]:
        """Of each group the tokens that may come next, in their order. All at once, which takes as long as one."""
        may_come: list[int] = (mask[self._words] >> self._bits & 1).tolist()
        at = 0
        for num, group in self._groups:
            yield list(compress(group, may_come[at : at + num]))
            at += num

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

    def respelled(self, token_ids: list[int]) -> list[int]:
        """The same, as few tokens as ``spell`` makes of it; special ones stay what they are."""
        runs = ((is_special, list(run)) for is_special, run in groupby(token_ids, self._vocabulary.is_special_token))
        return [each for is_special, run in runs for each in (run if is_special else self.spell(self.bytes_of(run)))]

    def bytes_of(self, token_ids: list[int]) -> bytes:
        """What they say."""
        return self._vocabulary.decode_bytes(token_ids)

    def likeliest(self, mask: npt.NDArray[np.uint32], path: list[int]) -> list[int]:
        """A few of the tokens that may come next, those first that lead to an end; what the path has already comes
        after what it has not."""
        used = set(path)
        telling, quotes, structure, digits, starts, *content = self._allowed(mask)
        if not telling:
            found = structure + sorted(digits, key=used.__contains__) + starts
        else:
            found = quotes[:1]
            # Of each kind the first, then of each the second; each time another kind leads.
            turn = len(path) % len(content)
            kinds = [*content[turn:], *content[:turn]]
            groups = [sorted(kind, key=used.__contains__) for kind in kinds]
            found += [token_id for each in zip_longest(*groups) for token_id in each if token_id is not None]
        if not found:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits)[: _MOST_BRANCHES + 1].tolist()
        return found if len(found) <= _MOST_BRANCHES else found[:_BRANCHES]


def find_end(
    matcher: LLMatcher,
    ends: Ends,
    max_tokens: int,
    max_masks: int = MAX_MASKS,
    scan: Scan | None = None,
    expressions: Sequence[Expression] = (),
    max_s: float = math.inf,
) -> list[int] | None:
    """At most so many tokens after which the answer is whole; None where none were found. ``matcher`` is left as it
    is. ``scan``: of the answer so far, whose strings may have to match one of ``expressions``. ``max_s``: of CPU, or it
    raises TookTooLong."""
    if matcher.is_accepting():
        return []
    until = time.thread_time() + max_s
    way, turns, seen = _Way(matcher.deep_copy(), scan, expressions), _Turns(), set[tuple[int, int]]()
    num_masks = 0
    path: list[int] | None = []
    while path is not None and num_masks < max_masks:
        num_dived = 0
        for mask in way.walk(ends, max_tokens) if way.go(path) else ():
            num_masks, num_dived = num_masks + 1, num_dived + 1
            if time.thread_time() > until:
                raise TookTooLong
            state = hash(mask.tobytes()), len(way.path)
            if state in seen or num_masks > max_masks or num_dived > _MAX_DIVE:
                break
            seen.add(state)
            first, *others = ends.likeliest(mask, way.path) or [-1]
            turns.add(way.path, others)
            if first < 0 or not way.step([first]):
                break
        if way.is_whole:
            way.shorten(ends)
            if len(way.path) <= max_tokens:
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

    def __init__(self, matcher: LLMatcher, scan: Scan | None, expressions: Sequence[Expression]) -> None:
        self._matcher = matcher
        self._scan, self._expressions = scan, expressions
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

    def shorten(self, ends: Ends) -> None:
        """To the same end in fewer tokens, where there are such: it has come there mark by mark."""
        path = [*self.path]
        fewer = ends.respelled(path)
        if len(fewer) < len(path) and not (self.go(fewer) and self.is_whole):
            self.go(path)

    def _has_room(self, ends: Ends, max_tokens: int) -> bool:
        return len(self.path) < max_tokens or len(ends.respelled(self.path)) < max_tokens

    def walk(self, ends: Ends, max_tokens: int) -> Iterator[npt.NDArray[np.uint32]]:
        """The mask at each place where there is a choice, until the answer is whole or too long."""
        while not self.is_whole and self._has_room(ends, max_tokens):
            forced = ends.spell(self._matcher.compute_ff_bytes())
            if forced:
                if not self.step(forced):
                    return
                continue
            if self._ends_string(ends):
                continue
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
            if self._matcher.is_error():
                return
            yield mask

    def _ends_string(self, ends: Ends) -> bool:
        """Where it is in a string that one of the expressions leads out of, it goes that way."""
        if self._scan is None:
            return False
        text = self._scan.after(ends.bytes_of(self.path)).string
        if text is None:
            return False
        endings = [ending for each in self._expressions if (ending := each.ending(text)) is not None]
        for ending in sorted(endings, key=len):
            token_ids = ends.spell(json.dumps(ending, ensure_ascii=False)[1:].encode("utf-8", "surrogatepass"))
            if token_ids and self._matcher.validate_tokens(token_ids) == len(token_ids):
                return self.step(token_ids)
        return False
