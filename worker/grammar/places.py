"""Where in an expression answers are: what may follow depends on nothing else, so a place's mask is made once.

A place is a set of states of the expression's automaton (policies.expressions), found byte by byte as tokens come. It
reads fewer expressions than llguidance, and of those the way of ASCII texts alone: an answer that goes another way is
nowhere from then on, and gets masks of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from policies import wire
from policies.expressions import Expression, NotRead
from policies.grammar import unanchored

Words = npt.NDArray[np.int32]

NOWHERE = 0
MAX_STATES = 8_000
"""Of the automaton's, in all places together."""
MAX_MASKS = 32


class Places:
    """Of one expression. Masks are for the thread of the step loop."""

    def __init__(self, expression: Expression, vocabulary: LLTokenizer) -> None:
        self._expression, self._vocabulary = expression, vocabulary
        self._states = [frozenset[int]()]
        self._numbers = {self._states[NOWHERE]: NOWHERE}
        self._after: list[dict[int, int]] = [{}]
        """From each place, where a byte leads to."""
        self._num_left = MAX_STATES
        self._lock = Lock()
        self._masks: OrderedDict[int, Words] = OrderedDict()
        self.begin = self._number(expression.begin())

    def after(self, place: int, token_id: int) -> int:
        """Where it is with one more token."""
        for byte in self._vocabulary.decode_bytes([token_id]):
            following = self._after[place].get(byte)
            if following is None:
                states = self._expression.after(self._states[place], chr(byte)) if byte < 0x80 else frozenset[int]()
                following = self._after[place][byte] = self._number(states)
            place = following
        return place

    def mask(self, place: int) -> Words | None:
        """As it was kept."""
        mask = self._masks.get(place)
        if mask is not None:
            self._masks.move_to_end(place)
        return mask

    def keep(self, place: int, mask: Words) -> None:
        """A copy of it, if it is a place."""
        if place == NOWHERE:
            return
        self._masks[place] = mask.copy()
        if len(self._masks) > MAX_MASKS:
            self._masks.popitem(last=False)

    def _number(self, states: frozenset[int]) -> int:
        # An answer that comes from elsewhere is followed on another thread than the step loop's.
        with self._lock:
            found = self._numbers.get(states)
            if found is not None:
                return found
            if len(states) > self._num_left:
                return NOWHERE
            self._num_left -= len(states)
            self._numbers[states] = len(self._states)
            self._after.append({})
            self._states.append(states)
            return len(self._states) - 1


def places_of(grammar: wire.Grammar, vocabulary: LLTokenizer) -> Places | None:
    """None: it is no expression, or none that is read here."""
    if grammar.kind != "regex":
        return None
    try:
        return Places(Expression(f"^(?:{unanchored(grammar.source)})$"), vocabulary)
    except NotRead:
        return None
