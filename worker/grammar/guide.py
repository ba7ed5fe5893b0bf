"""What holds one sequence to its grammar: where in it the answer is, what may come next, and that it can still end."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from worker.grammar.closing import TookTooLong
from worker.grammar.in_time import InTime, allows_others
from worker.grammar.nodes import NONE, NOWHERE, Mask, Node
from worker.grammar.places import Places, is_wide
from worker.grammar.trail import MAX_BEHIND, Trail
from worker.sampling.masks import Words

if TYPE_CHECKING:
    from worker.grammar.aside import Rules

MAX_TRUST = 3
"""Draws whose tokens the grammar forbids, one after the other, before it is expected of the next one, too."""
PROBES = (b"que", b"zen")
"""Texts whose first tokens may come next where nearly every one may, and that hardly anything begins with by chance.
Where a letter or two has room, and no more, a mask is soon made, and hardly any token is allowed."""
NEVER = 1 << 62
"""In place of a number of tokens."""
TOO_MANY_STATES = (
    "an expression in it has to keep too much in mind, as .*a.{40} does, which counts from every a at once: make such"
    " counts smaller, or what may come before them narrower"
)
RETRY_EVERY = 8
"""Tokens after which one is drawn without again."""


class Guide:
    """Of one sequence."""

    __slots__ = (
        "_place",
        "_places",
        "_probes",
        "_token_ids",
        "_trust",
        "free_from",
        "has_own_stops",
        "in_time",
        "node",
        "rules",
        "stop_token_ids",
        "trail",
        "vocabulary",
    )

    is_aside: ClassVar[bool] = False
    """It is followed on a thread of its own, see worker.grammar.aside."""

    def __init__(
        self,
        trail: Trail,
        vocabulary: LLTokenizer,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int] = frozenset(),
        in_time: InTime | None = None,
        probes: Sequence[int] = (),
        places: Places | None = None,
        free_from: int = 0,
        rules: Rules | None = None,
    ) -> None:
        """``trail``: before its first token; ``stop_token_ids``: end the answer as well as the model's own do;
        ``in_time``: where the grammar is strict. ``probes``: the tokens of PROBES, if there are such. ``places``: of a
        grammar in which they are known. ``free_from``: tokens from which on what may come has no say in which of it
        comes, so that one may be drawn without a mask. ``rules``: of its grammar; None: nobody asks what that takes."""
        self.free_from = free_from
        self.rules = rules
        self.trail = trail
        self._token_ids = trail.token_ids
        self.vocabulary = vocabulary
        self.stop_token_ids = eos_token_ids | stop_token_ids
        self.has_own_stops = not stop_token_ids <= eos_token_ids
        """They are in no mask before it is made its own."""
        self.in_time = in_time
        self._probes = probes
        self._places = places
        self._place = NOWHERE if places is None else places.begin
        """Where it was when its node was not known."""
        self.node: Node | None = None
        """Where it is, if that is known; llguidance need not be asked there."""
        self._arrive(NONE)
        self._trust = MAX_TRUST
        """That what the model would say is allowed; below 0: for so long it has not been asked."""

    @property
    def matcher(self) -> LLMatcher:
        """It has all tokens."""
        return self.trail.matcher

    @property
    def mask(self) -> Mask | None:
        """Of what may come where its node is, if it is kept and no token must come."""
        node = self.node
        if node is None or node.place.mask is not None or self._places is None:
            return None if node is None else node.place.mask
        return self._places.mask(node.place)

    @property
    def is_whole(self) -> bool:
        """Nothing can be added."""
        if self.node is not None:
            return self.node.is_whole
        matcher = self.matcher
        return matcher.is_stopped() and not matcher.is_error()

    @property
    def is_late(self) -> bool:
        """What may come behind its last token is not known yet, and not to be waited for."""
        return False

    @property
    def is_cut(self) -> bool:
        """It goes another way than it would have, had it had more room."""
        return self.in_time is not None and self.in_time.is_cut

    @property
    def is_leaving(self) -> bool:
        """It has had its last mask that is made within the step."""
        return self.rules is not None and self.rules.is_aside

    @property
    def is_doubted(self) -> bool:
        """It may take too long within the step, or does."""
        return self.rules is not None and (self.rules.is_doubted or self.rules.is_aside)

    def took(self, seconds: float) -> None:
        """So much CPU within the step."""
        if self.rules is not None:
            self.rules.took(seconds)

    def is_careful(self, num_left: int, num_drafted: int = 0) -> bool:
        """See InTime; where that takes too long, it is leaving."""
        in_time = self.in_time
        if in_time is None or self.is_leaving:
            return in_time is not None
        try:
            return in_time.is_careful(num_left, num_drafted)
        except TookTooLong:
            return self._leaves(in_time) or in_time.is_careful(num_left, num_drafted)

    def accepts(self, token_id: int, num_left: int) -> bool:
        """See InTime; where that takes too long, it is leaving."""
        in_time = self.in_time
        assert in_time is not None
        try:
            return in_time.accepts(token_id, num_left)
        except TookTooLong:
            return self._leaves(in_time) or in_time.accepts(token_id, num_left)

    def _leaves(self, in_time: InTime) -> bool:
        """False: it has nowhere to go."""
        if self.rules is not None:
            self.rules.leave()
        in_time.is_patient = True
        return self.is_leaving

    def replay(self, token_ids: Sequence[int], max_tokens: int, is_cut: bool = False) -> bool:
        """Where an answer of ``max_tokens`` goes on that has these and ``is_cut``, and whether they are such an
        answer's beginning."""
        in_time = self.in_time
        if in_time is not None:
            in_time.is_patient = True
        for num, token_id in enumerate(token_ids):
            if not self.goes_on(token_id, max_tokens - num):
                return False
            self.advance(token_id)
        if in_time is not None:
            in_time.is_cut, in_time.is_patient = is_cut, False
        return True

    def goes_on(self, token_id: int, num_left: int) -> bool:
        """Whether it may, with a token of an answer that was written elsewhere."""
        in_time = self.in_time
        if in_time is not None and in_time.is_careful(num_left) and not in_time.accepts(token_id, num_left):
            in_time.gives_up()
        return bool(self.matcher.validate_tokens([token_id]))

    def advance(self, token_id: int) -> None:
        """It has this token now."""
        token_ids = self._token_ids
        token_ids.append(token_id)
        if len(token_ids) % MAX_BEHIND == 0:
            self.trail.catch_up()
        places, node = self._places, self.node
        if places is None:
            return
        if node is not None:
            following = node.after.get(token_id) or node.after_plain.get(places.plain[token_id])
            if following is not None:
                self.node = following
                return
        at = self._place if node is None else node.at
        # An end that is passed over is no text, and nothing is behind it.
        self._place = NOWHERE if token_id in self.stop_token_ids else places.after(at, token_id)
        self._arrive(token_id)
        if node is not None and self.node is not None:
            places.join(node, token_id, self.node)

    def _arrive(self, token_id: int) -> None:
        """At its place, with this token."""
        places, place = self._places, self._place
        self.node = None
        if places is not None and place.tells:
            self.node = place.node or places.node(place, token_id, self.trail)

    def num_allowed(self, token_ids: list[int]) -> int:
        """Of these, how many may follow, and be verified together."""
        return 0 if self.is_doubted else self.matcher.validate_tokens(token_ids)

    def forced(self, max_tokens: int = 1) -> list[int]:
        """The tokens that come next in any case; as a rule there are none."""
        found: list[int] = []
        if self.is_doubted or (self.node is not None and self.node.forced == NONE):
            return found
        matcher = self.matcher
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
        matcher = self.matcher
        num = 0
        for place, token_id in enumerate(token_ids):
            if place not in masked and not self._lets_through(token_id):
                break
            if place + 1 < len(token_ids) and token_id not in self.stop_token_ids:
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
        return bool(self.matcher.compute_ff_bytes())

    def _forced(self) -> list[int]:
        # To know the bytes that must come takes a tenth of what their tokens take.
        return self.matcher.compute_ff_tokens() if self.matcher.compute_ff_bytes() else []

    def _lets_through(self, token_id: int) -> bool:
        forced = self._forced()
        return forced[0] == token_id if forced else self._allows(token_id)

    def _allows(self, token_id: int) -> bool:
        matcher = self.matcher
        is_end = token_id in self.stop_token_ids and matcher.is_accepting()
        return is_end or bool(matcher.validate_tokens([token_id]))

    def allows_others(self, token_ids: Collection[int], drafted: list[int]) -> bool:
        """Whether any but these may come behind so much of a draft; of a sequence that goes on no more."""
        matcher = self.matcher
        if matcher.try_consume_tokens(drafted) != len(drafted):
            return True
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        return matcher.is_error() or allows_others(words, token_ids)

    def keep_mask(self, mask: Words) -> None:
        """Of where it is, as llguidance made it."""
        node = self.node
        if self._places is not None and node is not None and node.forced == NONE and not self.matcher.is_error():
            self._places.keep(node.place, mask)

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
        return self.node is None and is_wide(self.matcher, self._probes)

    def takes(self, token_id: int) -> bool:
        """Whether this one may come, which was drawn without a mask; of one whose node is known."""
        node = self.node
        assert node is not None
        if token_id in node.after or token_id < 0:
            return True
        place, mask = node.place, self.mask
        if mask is not None:
            bits, may_end = mask
            is_in = bits.words[token_id >> 5] >> (token_id & 31) & 1
            return bool(is_in) or (may_end and token_id in self.stop_token_ids)
        assert self._places is not None
        is_found = self._places.fits(place, token_id) or self._allows(token_id)
        if not place.is_wide:
            self.tried(is_found)
        return is_found

    def pick(self, token_ids: list[int], is_telling: bool) -> bool:
        """``token_ids``: one that was drawn without a mask, and behind it those that would have come without it. Puts
        the first one that the grammar allows in front, or the only one that it does. False: it is none of them, and
        there is more than one. ``is_telling``: where there was a choice, that is what counts as tried."""
        if token_ids[0] < 0:
            return True
        forced = self._forced()
        if forced:
            token_ids[0] = forced[0]
            return True
        is_found = False
        for token_id in token_ids:
            if token_id < 0:
                break
            if self._allows(token_id):
                token_ids[0] = token_id
                is_found = True
                break
        if is_telling:
            self.tried(is_found)
        return is_found


def first_line(error: str) -> str:
    """Of what llguidance says, with what to do where it is an expression that has too many states."""
    line = error.strip().partition("\n")[0][:300]
    return f"{line}; {TOO_MANY_STATES}" if "too many states" in line else line
