"""What holds one sequence to its grammar: where in it the answer is, what may come next, and that it can still end.

Where the grammar is strict, a token counts only if after it an end is known that fits into the tokens that are left
(``accepts``). As long as they are far more than any end can take, nothing is looked for: what an end takes at most
grows with each token by no more than ``Reach`` says, and is found out again when it comes near to what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from worker.grammar.closing import Ends, find_end, num_opened

MAX_MASKS = 200
"""Of a search for an end in the middle of an answer, where all others wait."""
MAX_REFUSED = 3
"""Tokens of one place that may turn out to lead too far; then it is the known end's turn."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How a grammar's answers end."""

    ends: Ends
    each: int | None
    """Tokens that one thing begun, a string, a list, a member of an object, adds to the shortest end at most; None: it
    is not known."""

    @property
    def most(self) -> int:
        """By one token; of a grammar whose ``each`` is known."""
        assert self.each is not None
        return self.each * (1 + self.ends.most_opened)

    def of(self, token: bytes) -> int:
        """As ``most``, by this one."""
        assert self.each is not None
        return self.each * (1 + num_opened(token))


class Guide:
    """Of one sequence. ``num_left`` is always what it may still have, the token in question included."""

    __slots__ = (
        "_end",
        "_farthest",
        "_found",
        "_is_endless",
        "_is_fresh",
        "_matcher",
        "_num_refused",
        "_reach",
        "_stops",
        "is_cut",
        "vocabulary",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        stop_token_ids: frozenset[int],
        reach: Reach | None = None,
        end: list[int] | None = None,
    ) -> None:
        """``stop_token_ids``: any of them ends the answer, the model's own among them; ``reach``: of a strict grammar,
        with an end from its beginning; where none was found that fits, none is promised."""
        self._matcher = matcher
        self.vocabulary = vocabulary
        self._reach = reach
        self._stops = stop_token_ids
        self._end = end
        """Tokens that would make it whole, from here if it is fresh, else from where it was a while ago."""
        self._is_fresh = end is not None
        self._farthest = None if end is None else len(end)
        """An end takes no more than that."""
        self._is_endless = end is None
        self._found: tuple[int, list[int]] | None = None
        """A token that was accepted, and the end after it."""
        self._num_refused = 0
        self.is_cut = False
        """It goes another way than it would have, had it had more room."""

    @property
    def matcher(self) -> LLMatcher:
        """For masks."""
        return self._matcher

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stops

    @property
    def is_whole(self) -> bool:
        """Nothing can be added."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def replay(self, token_ids: Sequence[int], max_tokens: int) -> bool:
        """Where an answer of ``max_tokens`` goes on that has these, and whether they are such an answer's beginning."""
        for place, token_id in enumerate(token_ids):
            if self.is_careful(max_tokens - place) and not self.accepts(token_id, max_tokens - place):
                self._is_endless = True
            if self._matcher.try_consume_tokens([token_id]) != 1:
                return False
            self._moved(token_id)
        return True

    def advance(self, token_id: int) -> None:
        """It has this token now. What cannot be followed from there (a bound of llguidance's) shows in the next
        mask."""
        self._matcher.consume_token(token_id)
        self._moved(token_id)

    def num_allowed(self, token_ids: list[int]) -> int:
        """Of these, how many may follow."""
        return self._matcher.validate_tokens(token_ids)

    # An end in time

    def is_careful(self, num_left: int, num_drafted: int = 0) -> bool:
        """The next token, or one of the drafted ones before it, may lead to where no end fits any more."""
        reach = self._reach
        if reach is None or self._is_endless:
            return False
        if reach.each is None:
            return self._has_end(num_left)
        most = reach.most * (1 + num_drafted)
        if self._farthest is not None and self._farthest + most < num_left - num_drafted:
            return False
        if not self._has_end(num_left):
            return False
        assert self._farthest is not None
        return self._farthest + most >= num_left - num_drafted

    def accepts(self, token_id: int, num_left: int) -> bool:
        """Whether the answer can end in time after this token; of a careful place."""
        end = self._end_after(token_id, num_left - 1)
        if end is None:
            self._num_refused += 1
            self.is_cut = True
            return False
        self._found = token_id, end
        return True

    def narrow(self, mask: npt.NDArray[np.int32], token_id: int) -> None:
        """Takes a token that was not accepted out of the row of a mask; after too many of them leaves the known end."""
        if self._num_refused <= MAX_REFUSED:
            mask.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
            if mask.any():
                return
        assert self._end is not None
        mask[:] = 0
        for token_id in self._end[:1] or self._stops:
            allow(mask, token_id)

    def _has_end(self, num_left: int) -> bool:
        """Makes sure that an end is known from here."""
        if not self._is_fresh:
            assert self._reach is not None
            if self._end is None or not self._leads_to_end(self._end):
                self._end = find_end(self._matcher, self._reach.ends, num_left, MAX_MASKS)
            if self._end is None or len(self._end) > num_left:
                self._is_endless = True
                return False
            self._is_fresh, self._farthest = True, len(self._end)
        return True

    def _end_after(self, token_id: int, max_tokens: int) -> list[int] | None:
        matcher, end = self._matcher, self._end
        assert self._reach is not None
        assert end is not None
        if token_id in self._stops:
            return []
        if end[:1] == [token_id]:
            return end[1:]
        if matcher.try_consume_tokens([token_id]) != 1:
            return None
        after: list[int] | None = end
        if len(end) > max_tokens or not self._leads_to_end(end):
            after = find_end(matcher, self._reach.ends, max_tokens, MAX_MASKS)
        matcher.rollback(1)
        return after

    def _leads_to_end(self, token_ids: list[int]) -> bool:
        num = self._matcher.try_consume_tokens(token_ids)
        leads = num == len(token_ids) and self._matcher.is_accepting()
        self._matcher.rollback(num)
        return leads

    def _moved(self, token_id: int) -> None:
        found, self._found, self._num_refused = self._found, None, 0
        if found is not None and found[0] == token_id:
            self._end = found[1]
            self._farthest = len(self._end)
            return
        if self._is_fresh and self._end and self._end[0] == token_id:
            del self._end[0]
        else:
            self._is_fresh = False
        if self._farthest is not None and self._reach is not None and self._reach.each is not None:
            self._farthest += self._reach.of(self.vocabulary.decode_bytes([token_id]))


def allow(mask: npt.NDArray[np.int32], token_id: int) -> None:
    """One more token, in the row of a mask."""
    mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def first_line(error: str) -> str:
    """Of what llguidance says."""
    return error.strip().partition("\n")[0][:300]
