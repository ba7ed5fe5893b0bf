"""What holds one sequence to its grammar: where in it the answer is, what may come next, and that it can still end.

Where the grammar is strict, a token counts only if after it an end is known that fits into the tokens that are left
(``accepts``). As long as they are more than any end can take (policies.schemas), nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from policies.expressions import Expression
from policies.schemas import Bound
from worker.grammar.closing import Ends, find_end
from worker.grammar.places import NOWHERE, Places, Words
from worker.grammar.scan import Scan

MAX_MASKS = 200
"""Of a search for an end in the middle of an answer, where all others wait."""
MAX_TRUST = 3
"""Draws whose tokens the grammar forbids, one after the other, before it is expected of the next one, too."""
PROBES = (b"que", b"zen")
"""Texts whose first tokens may come next where nearly every one may, and that hardly anything begins with by chance.
Where a letter or two has room, and no more, a mask is soon made, and hardly any token is allowed."""
RETRY_EVERY = 8
"""Tokens after which one is drawn without again."""
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

    def scan(self) -> Scan | None:
        """Where what has been read of an answer counts."""
        return Scan() if self.is_deep or self.expressions else None


class Guide:
    """Of one sequence. ``num_left`` is always what it may still have, the token in question included."""

    __slots__ = (
        "_ahead",
        "_end",
        "_found",
        "_is_endless",
        "_is_fresh",
        "_looks_from",
        "_matcher",
        "_num_refused",
        "_place",
        "_places",
        "_probes",
        "_reach",
        "_scan",
        "_stops",
        "_trust",
        "_unread",
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
        probes: Sequence[int] = (),
        places: Places | None = None,
    ) -> None:
        """``stop_token_ids``: any of them ends the answer, the model's own among them; ``reach``: of a strict grammar,
        with an end from its beginning, if it needs one; where none was found that fits, none is promised. ``probes``:
        the tokens of PROBES, if there are such. ``places``: of a grammar whose masks are kept."""
        self._matcher = matcher
        self.vocabulary = vocabulary
        self._reach = reach
        self._stops = stop_token_ids
        self._probes = probes
        self._places = places
        self._place = NOWHERE if places is None else places.begin
        self._ahead: list[int] = []
        """Tokens behind that place: nobody asks where those answers are that are never refused a token."""
        self._end = end
        """Tokens that would make it whole, from here if it is fresh, else from where it was a while ago."""
        self._is_fresh = end is not None
        self._is_endless = end is None and (reach is None or reach.far(0) is None)
        self._looks_from = 1 << 62
        """Tokens that are left when an end is looked for again."""
        self._scan = None if reach is None else reach.scan()
        self._unread: list[int] = []
        """Tokens that it has not read yet: as a rule nobody asks it before the end."""
        self._found: tuple[int, list[int]] | None = None
        """A token that was accepted, and the end after it."""
        self._num_refused = 0
        self._trust = MAX_TRUST
        """That what the model would say is allowed; below 0: for so long it has not been asked."""
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

    def forced(self, max_tokens: int = 1) -> list[int]:
        """The tokens that come next in any case; as a rule there are none."""
        matcher = self._matcher
        found: list[int] = []
        num = 0
        # One by one: how the last of many are cut depends on where the first ones end.
        while len(found) < max_tokens and (token_ids := matcher.compute_ff_tokens()):
            found.append(token_ids[0])
            if len(found) == max_tokens or matcher.try_consume_tokens(token_ids[:1]) != 1:
                break
            num += 1
        if num:
            matcher.rollback(num)
        return found

    def num_held_to(self, token_ids: Sequence[int], masked: Container[int] = ()) -> int:
        """How many of these, one after the other, a mask would let through; ``masked``: the places of those that one
        has."""
        matcher = self._matcher
        num = 0
        for place, token_id in enumerate(token_ids):
            if place not in masked and not self._lets_through(token_id):
                break
            if place + 1 < len(token_ids) and token_id not in self._stops:
                if matcher.try_consume_tokens([token_id]) != 1:
                    break
                num += 1
        else:
            place = len(token_ids)
        if num:
            matcher.rollback(num)
        return place

    def must_go_on(self) -> bool:
        """There is no choice, and the token that must come is known without a mask."""
        return bool(self._matcher.compute_ff_bytes())

    def _forced(self) -> list[int]:
        # To know the bytes that must come takes a tenth of what their tokens take.
        return self._matcher.compute_ff_tokens() if self._matcher.compute_ff_bytes() else []

    def _lets_through(self, token_id: int) -> bool:
        forced = self._forced()
        if forced:
            return forced[0] == token_id
        is_end = token_id in self._stops and self._matcher.is_accepting()
        return is_end or bool(self._matcher.validate_tokens([token_id]))

    @property
    def kept_mask(self) -> Words | None:
        """Of what may come next, if it is known from another answer. Whether a token must come, and which, depends on
        what was before, too."""
        mask = None if self._places is None else self._places.mask(self._follow())
        return None if mask is None or self._forced() else mask

    def keep_mask(self, mask: Words) -> None:
        """As llguidance made it."""
        places = self._places
        if places is not None and places.tells(self._follow()) and not (self._forced() or self._matcher.is_error()):
            places.keep(self._place, mask)

    def _follow(self) -> int:
        """Its place."""
        if self._ahead and self._places is not None:
            self._place = self._places.after(self._place, self._ahead)
            self._ahead.clear()
        return self._place

    # Whether the model keeps to it by itself

    @property
    def is_wayward(self) -> bool:
        """What the model would say is hardly ever allowed, so that masks had better be there before."""
        return self._trust <= 0

    def is_due(self) -> bool:
        """Of a wayward one: once in a while it is tried again."""
        self._trust -= 1
        return self._trust <= -RETRY_EVERY

    def tried(self, is_allowed: bool) -> None:
        """A token was drawn without a mask."""
        self._trust = MAX_TRUST if is_allowed else max(0, self._trust - 1)

    def is_wide(self) -> bool:
        """Much may come next, as within a text: a mask takes long there, and some of the tokens that the model would
        say one after the other is allowed. Not where a mask serves other answers, too."""
        if self._places is not None and self._places.tells(self._follow()):
            return False
        for token_id in self._probes:
            if not self._matcher.validate_tokens([token_id]):
                return False
        return bool(self._probes)

    def pick(self, token_ids: list[int], is_telling: bool) -> bool:
        """``token_ids``: one that was drawn without a mask, and behind it those that would have come without it. Puts
        the first one that the grammar allows in front, or the only one that it does. False: it is none of them, and
        there is more than one. ``is_telling``: where there was a choice, that is what counts as tried."""
        if token_ids[0] < 0:
            return True
        matcher = self._matcher
        forced = self._forced()
        if forced:
            token_ids[0] = forced[0]
            return True
        is_found = False
        for token_id in token_ids:
            if token_id < 0:
                break
            if matcher.validate_tokens([token_id]) or (token_id in self._stops and matcher.is_accepting()):
                token_ids[0] = token_id
                is_found = True
                break
        if is_telling:
            self.tried(is_found)
        return is_found

    # An end in time

    def is_careful(self, num_left: int, num_drafted: int = 0) -> bool:
        """The next token, or one of the drafted ones before it, may lead to where no end fits any more."""
        reach = self._reach
        if reach is None or self._is_endless:
            return False
        scan = self._read() if reach.is_deep else None
        far = reach.far(0 if scan is None else scan.num_levels)
        num_free = num_left - num_drafted
        if far is None or num_free <= far:
            return self._has_end(num_left)
        # Where an end is known to be there, it had better be found before it must be.
        if num_free > min(far + EARLY_TOKENS, self._looks_from):
            return False
        if self._finds_end(num_left):
            return True
        self._looks_from = num_left - RETRY_SEARCH_EVERY
        return False

    def accepts(self, token_id: int, num_left: int) -> bool:
        """Whether the answer can end in time after this token; of a careful place."""
        end = self._end_after(token_id, num_left - 1)
        if end is None:
            self._num_refused += 1
            self.is_cut = True
            return False
        self._found = token_id, end
        return True

    def narrow(self, mask: Words, token_id: int) -> None:
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
        """Makes sure that an end is known from here; where none is found, none is looked for any more."""
        self._is_endless = not self._finds_end(num_left)
        return not self._is_endless

    def _finds_end(self, num_left: int) -> bool:
        if not self._is_fresh:
            assert self._reach is not None
            if self._end is None or not self._leads_to_end(self._end):
                self._end = self._search(num_left, self._read())
            if self._end is None:
                return False
            self._is_fresh = True
        return self._end is not None and len(self._end) <= num_left

    def _search(self, max_tokens: int, scan: Scan | None) -> list[int] | None:
        assert self._reach is not None
        expressions = self._reach.expressions
        return find_end(
            self._matcher, self._reach.ends, max_tokens, MAX_MASKS, scan if expressions else None, expressions
        )

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
            scan = self._read()
            if scan is not None:
                scan = scan.after(self.vocabulary.decode_bytes([token_id]))
            after = self._search(max_tokens, scan)
        matcher.rollback(1)
        return after

    def _leads_to_end(self, token_ids: list[int]) -> bool:
        num = self._matcher.try_consume_tokens(token_ids)
        leads = num == len(token_ids) and self._matcher.is_accepting()
        self._matcher.rollback(num)
        return leads

    def _read(self) -> Scan | None:
        """What has been read of the answer, all of it."""
        if self._unread and self._scan is not None:
            self._scan.feed(self.vocabulary.decode_bytes(self._unread))
            self._unread.clear()
        return self._scan

    def _moved(self, token_id: int) -> None:
        found, self._found, self._num_refused = self._found, None, 0
        if self._scan is not None:
            self._unread.append(token_id)
        if self._places is not None:
            self._ahead.append(token_id)
        if found is not None and found[0] == token_id:
            self._end = found[1]
        elif self._is_fresh and self._end and self._end[0] == token_id:
            del self._end[0]
        else:
            self._is_fresh = False


def allow(mask: Words, token_id: int) -> None:
    """One more token, in the row of a mask."""
    mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def first_line(error: str) -> str:
    """Of what llguidance says."""
    return error.strip().partition("\n")[0][:300]
