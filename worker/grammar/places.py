"""Where answers are in their grammar: what may follow depends on nothing else, so a place's mask is made once.

Of an expression a place is a set of states of its automaton (policies.expressions), of a schema what
worker.grammar.outline makes of it, found byte by byte as tokens come. Both read less than llguidance does: an answer
that goes another way is nowhere from then on, and gets masks of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from policies import wire
from policies.expressions import Expression, NotRead
from policies.grammar import read_schema, unanchored
from worker.grammar.outline import Outline

Words = npt.NDArray[np.int32]

NOWHERE = 0
MAX_WEIGHT = 50_000
"""Of all places of a grammar together, in numbers or so."""
MAX_MASK_BYTES = 32 << 20
"""Of those that are kept, of all grammars together."""


class Reader(Protocol):
    """Of a grammar: states that answers are in, and which lead to which."""

    def begin(self) -> Hashable: ...

    def after(self, state: Any, byte: int) -> Hashable | None:
        """None: there is none that is known."""

    def weight(self, state: Any) -> int: ...

    def tells(self, state: Any) -> bool:
        """What may follow depends on nothing else."""


class KeptMasks:
    """The masks of places, those used longest ago go first. For the thread of the step loop."""

    def __init__(self) -> None:
        self._masks: OrderedDict[tuple[Places, int], Words] = OrderedDict()
        self._num_bytes = 0

    def find(self, places: Places, place: int) -> Words | None:
        """As it was kept."""
        mask = self._masks.get((places, place))
        if mask is not None:
            self._masks.move_to_end((places, place))
        return mask

    def keep(self, places: Places, place: int, mask: Words) -> None:
        """A copy of one that is not here."""
        self._masks[places, place] = mask.copy()
        self._num_bytes += mask.nbytes
        while self._num_bytes > MAX_MASK_BYTES:
            _, gone = self._masks.popitem(last=False)
            self._num_bytes -= gone.nbytes


class Places:
    """Of one grammar."""

    def __init__(self, reader: Reader, vocabulary: LLTokenizer, masks: KeptMasks) -> None:
        self._reader, self._vocabulary, self._masks = reader, vocabulary, masks
        self._states: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {None: NOWHERE}
        self._tells = [False]
        self._after: list[dict[int, int]] = [{}]
        """From each place, where a byte leads to."""
        self._weight = 0
        self._lock = Lock()
        self.begin = self._number(reader.begin())

    def after(self, place: int, token_ids: list[int]) -> int:
        """Where it is with these tokens, too."""
        for byte in self._vocabulary.decode_bytes(token_ids):
            following = self._after[place].get(byte)
            place = self._follow(place, byte) if following is None else following
        return place

    def tells(self, place: int) -> bool:
        """Wherever two answers are at this place, the same may follow."""
        return self._tells[place]

    def mask(self, place: int) -> Words | None:
        """As it was kept."""
        return self._masks.find(self, place) if self._tells[place] else None

    def keep(self, place: int, mask: Words) -> None:
        """A copy of it, if it tells of others."""
        if self._tells[place] and self._masks.find(self, place) is None:
            self._masks.keep(self, place, mask)

    def _follow(self, place: int, byte: int) -> int:
        # An answer that comes from elsewhere is followed on another thread than the step loop's.
        with self._lock:
            state = None if place == NOWHERE else self._reader.after(self._states[place], byte)
            following = self._after[place][byte] = self._number(state)
        return following

    def _number(self, state: Hashable | None) -> int:
        found = self._numbers.get(state)
        if found is not None:
            return found
        weight = self._reader.weight(state)
        if self._weight + weight > MAX_WEIGHT:
            return NOWHERE
        self._weight += weight
        number = self._numbers[state] = len(self._states)
        self._states.append(state)
        self._tells.append(self._reader.tells(state))
        self._after.append({})
        return number


class _Text:
    """An expression, of which ASCII is read."""

    def __init__(self, source: str) -> None:
        """Raises NotRead."""
        self._expression = Expression(f"^(?:{unanchored(source)})$")

    def begin(self) -> frozenset[int]:
        return self._expression.begin()

    def after(self, state: frozenset[int], byte: int) -> frozenset[int] | None:
        return (self._expression.after(state, chr(byte)) if byte < 0x80 else None) or None

    def weight(self, state: frozenset[int]) -> int:
        return 8 + len(state)

    def tells(self, state: frozenset[int]) -> bool:
        return True


def places_of(grammar: wire.Grammar, vocabulary: LLTokenizer, masks: KeptMasks) -> Places | None:
    """None: it is not read here."""
    match grammar.kind:
        case "regex":
            try:
                return Places(_Text(grammar.source), vocabulary, masks)
            except NotRead:
                return None
        case "json_schema":
            outline = Outline(read_schema(grammar.source))
            return Places(outline, vocabulary, masks) if outline.is_read else None
        case _:
            return None
