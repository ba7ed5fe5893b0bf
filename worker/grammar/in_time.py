"""That an answer which is held to a strict grammar can still end: a token counts only if after it an end is known that
fits into the tokens that are left. As long as they are more than any end can take (policies.schemas), nothing is looked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.expressions import Expression
from policies.schemas import Bound
from worker.grammar.closing import Ends, TookTooLong, find_end
from worker.grammar.scan import Scan

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from worker.grammar.trail import Trail
    from worker.sampling.masks import Words

MAX_MASKS = 200
"""Of a search for an end in the middle of an answer."""
MAX_STEP_S, MAX_ASIDE_S = 0.1, 1.0
"""Of CPU, for such a search: where all others wait, and where they do not."""
MAX_REFUSED = 3
"""Tokens of one place that may turn out to lead too far; then it is the known end's turn."""
RETRY_SEARCH_EVERY = 8
"""Tokens after which an end is looked for again that was not found before it had to be."""
EARLY_TOKENS = 64
"""So long before it must be known an end is looked for."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How a grammar's answers end."""

    ends: Ends
    bound: Bound | None = None
    """None: an end may be as far as it likes."""
    expressions: Sequence[Expression] = ()
    """That strings in it must match."""

    def needs_end(self, max_tokens: int) -> bool:
        """An answer of so many tokens begins near enough to its end."""
        far = self.far(0)
        return far is None or max_tokens <= far + EARLY_TOKENS

    def far(self, num_levels: int) -> int | None:
        """Tokens to the end at most, after one more token."""
        bound = self.bound
        if bound is None or not self.ends.spells_bytes:
            return None
        return bound.of(num_levels + self.ends.most_levels)

    @property
    def is_deep(self) -> bool:
        """It depends on how deep an answer is in itself."""
        return self.bound is not None and self.bound.total is None

    @property
    def comes_nearer(self) -> int:
        """Tokens by which a token may bring an answer nearer to where its end must be known."""
        return 1 if not self.is_deep or self.bound is None else 1 + self.bound.level * self.ends.most_levels

    def scan(self) -> Scan | None:
        """Where what has been read of an answer counts."""
        return Scan() if self.is_deep or self.expressions else None


class InTime:
    """Of one answer. ``num_left`` is always what it may still have, the token in question included."""

    __slots__ = (
        "_end",
        "_found",
        "_is_endless",
        "_is_fresh",
        "_looks_from",
        "_num_moved",
        "_num_scanned",
        "_reach",
        "_safe_above",
        "_scan",
        "_stops",
        "_trail",
        "_vocabulary",
        "is_cut",
        "is_patient",
    )

    def __init__(
        self,
        reach: Reach,
        end: list[int] | None,
        trail: Trail,
        stop_token_ids: frozenset[int],
        vocabulary: LLTokenizer,
    ) -> None:
        """``end``: from its beginning, if it needs one; where none was found that fits, none is promised."""
        self._reach, self._trail, self._stops, self._vocabulary = reach, trail, stop_token_ids, vocabulary
        self._end = end
        """Tokens that would make it whole, from here if it is fresh, else from where it was a while ago."""
        self._is_fresh = end is not None
        self._is_endless = end is None and reach.far(0) is None
        self._looks_from = 1 << 62
        """Tokens that are left when an end is looked for again."""
        self._safe_above = 1 << 62
        """Tokens that are left as long as nothing need be looked for."""
        self._scan = reach.scan()
        self._num_scanned = self._num_moved = 0
        """Tokens of the answer."""
        self._found: tuple[int, list[int]] | None = None
        """A token that was accepted, and the end after it."""
        self.is_cut = False
        """It goes another way than it would have, had it had more room."""
        self.is_patient = False
        """Nobody else waits: no search raises TookTooLong, and what is not found by then is not found."""

    def is_careful(self, num_left: int, num_drafted: int = 0) -> bool:
        """The next token, or one of the drafted ones before it, may lead to where no end fits any more."""
        num_free = num_left - num_drafted
        if self._is_endless or num_free > self._safe_above:
            return False
        reach = self._reach
        scan = self._read() if reach.is_deep else None
        far = reach.far(0 if scan is None else scan.num_levels)
        if far is None or num_left <= far:
            return self._has_end(num_left)
        # Where an end is known to be there, it had better be found before it must be.
        num_spare = num_free - min(far + EARLY_TOKENS, self._looks_from)
        if num_spare > 0:
            if not num_drafted:
                self._safe_above = num_free - (num_spare - 1) // reach.comes_nearer - 1
            return False
        if num_drafted:
            return True  # it is looked for at its place, however it is come to
        if self._finds_end(num_left):
            return True
        self._looks_from = num_left - RETRY_SEARCH_EVERY
        return False

    def accepts(self, token_id: int, num_left: int) -> bool:
        """Whether the answer can end in time after this token; of a careful place."""
        end = self._end_after(token_id, num_left - 1)
        if end is None:
            self.is_cut = True
            return False
        self._found = token_id, end
        return True

    def leads_on(self, token_id: int) -> bool:
        """It is known without a search that it can end in time after this token; of a careful place."""
        return token_id in self._stops or (self._end is not None and self._end[:1] == [token_id])

    def gives_up(self) -> None:
        """No end is promised any more."""
        self._is_endless = True

    def narrow(self, mask: Words, token_id: int, num_refused: int, may_end: bool) -> int:
        """Takes a token that was not accepted out of the row of a mask. After too many of them (``num_refused`` with
        this one), or where none is left: the one that leads to the known end, whatever the mask says of it; else below
        0. ``may_end``: else the answer is shorter than it should be, and none of its ends would be drawn.
        """
        mask.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        if num_refused <= MAX_REFUSED and (mask.any() if may_end else allows_others(mask, self._stops)):
            return -1
        assert self._end is not None
        return self._end[0] if self._end else min(self._stops, default=-1)

    def _has_end(self, num_left: int) -> bool:
        """Makes sure that an end is known from here; where none is found, none is looked for any more."""
        self._is_endless = not self._finds_end(num_left)
        return not self._is_endless

    def _finds_end(self, num_left: int) -> bool:
        self._move()
        if not self._is_fresh:
            if self._end is None or not self._leads_to_end(self._end):
                self._end = self._search(num_left, self._read())
            if self._end is None:
                return False
            self._is_fresh = True
        return self._end is not None and len(self._end) <= num_left

    def _search(self, max_tokens: int, scan: Scan | None) -> list[int] | None:
        reach = self._reach
        expressions = reach.expressions
        scan, max_s = scan if expressions else None, MAX_ASIDE_S if self.is_patient else MAX_STEP_S
        try:
            return find_end(self._trail.matcher, reach.ends, max_tokens, MAX_MASKS, scan, expressions, max_s)
        except TookTooLong:
            if self.is_patient:
                return None
            raise

    def _end_after(self, token_id: int, max_tokens: int) -> list[int] | None:
        matcher, end = self._trail.matcher, self._end
        assert end is not None
        if token_id in self._stops:
            return []
        if end[:1] == [token_id]:
            return end[1:]
        if matcher.try_consume_tokens([token_id]) != 1:
            return None
        after: list[int] | None = end
        if len(end) > max_tokens or not self._leads_to_end(end):
            scan = self._read()
            if scan is not None:
                scan = scan.after(self._vocabulary.decode_bytes([token_id]))
            try:
                after = self._search(max_tokens, scan)
            except TookTooLong:
                matcher.rollback(1)
                raise
        matcher.rollback(1)
        return after

    def _leads_to_end(self, token_ids: list[int]) -> bool:
        matcher = self._trail.matcher
        num = matcher.try_consume_tokens(token_ids)
        leads = num == len(token_ids) and matcher.is_accepting()
        matcher.rollback(num)
        return leads

    def _read(self) -> Scan | None:
        """What has been read of the answer, all of it."""
        token_ids = self._trail.token_ids
        if self._scan is not None and self._num_scanned < len(token_ids):
            self._scan.feed(self._vocabulary.decode_bytes(token_ids[self._num_scanned :]))
            self._num_scanned = len(token_ids)
        return self._scan

    def _move(self) -> None:
        """What its newest tokens make of the end that was known."""
        for token_id in self._trail.token_ids[self._num_moved :]:
            found, self._found = self._found, None
            if found is not None and found[0] == token_id:
                self._end = found[1]
            elif self._is_fresh and self._end and self._end[0] == token_id:
                del self._end[0]
            else:
                self._is_fresh = False
        self._num_moved = len(self._trail.token_ids)


def allow(mask: Words, token_id: int) -> None:
    """One more token, in the row of a mask."""
    mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def allows_others(mask: Words, token_ids: Iterable[int]) -> bool:
    """Whether the row of a mask lets through any but these."""
    these = np.zeros_like(mask)
    for token_id in token_ids:
        allow(these, token_id)
    return bool((mask & ~these).any())
