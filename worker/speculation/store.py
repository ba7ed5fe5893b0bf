"""Drafts copied from what was answered lately to the same tenant, with the same adapter.

What one salt has stored is found by that salt only, so nobody can tell from the time that an answer takes what others
have asked. Each salt has its texts in two automata, a filling one and a full one. States cannot be taken away from an
automaton, so what is oldest goes as a whole: the full one when the other has filled up, and both when the salt is the
one that was idle longest and room is needed. (Recent outputs as a source of drafts: SuffixDecoding, Oliaro et al. 2024,
arXiv 2411.04975.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Run
from itertools import count, takewhile

from worker.sequence import Sequence
from worker.speculation.automaton import ROOT, SuffixAutomaton
from worker.speculation.drafter import NO_DRAFT, Draft

MIN_MATCH = 2
"""As for a text of one's own."""
MAX_SHELF = 8192
"""Tokens of one automaton, of which a salt has two: some 500 bytes each."""
MAX_STORED = 1 << 17
"""Tokens of all salts."""
MAX_CONTEXT = 32
"""Tokens before an answer that are stored with it, so that its first one can be found."""
MAX_BEHIND = 8
"""Tokens that are looked at of a sequence that comes, or that was not looked at for long: a longer match would say
little more."""
MAX_TAKEN_IN = 64
"""Stored tokens that enter an automaton each time that anybody asks: an answer that ends costs nothing while nobody
does."""
_END = -1
"""Between two texts; no token, so no match and no draft reaches across it."""


class _Shelf:
    """Texts that go at the same time."""

    __slots__ = ("automaton", "number", "waiting")

    def __init__(self, number: int) -> None:
        self.automaton = SuffixAutomaton()
        self.number = number
        """Never given twice."""
        self.waiting: list[int] = []
        """To be taken in."""

    @property
    def num_tokens(self) -> int:
        return len(self.automaton.text) + len(self.waiting)

    def take_in(self) -> None:
        self.automaton.extend(self.waiting[:MAX_TAKEN_IN])
        del self.waiting[:MAX_TAKEN_IN]


class _Reading:
    """How far a sequence matches what one shelf has; it does not keep the shelf alive."""

    __slots__ = ("length", "num_seen", "state")

    def __init__(self, num_seen: int) -> None:
        self.state, self.length = ROOT, 0
        self.num_seen = num_seen
        """Tokens of the sequence."""


class StoreDrafter:
    """A Drafter that learns from every answer that has ended."""

    name = "store"
    is_free = True

    def __init__(self, max_shelf: int = MAX_SHELF, max_stored: int = MAX_STORED) -> None:
        """``max_stored``: at least as much as one shelf."""
        self._max_shelf, self._max_stored = max_shelf, max(max_stored, max_shelf)
        self._salts: OrderedDict[bytes, list[_Shelf]] = OrderedDict()
        """The one that was used last at the end, and of each the filling shelf first."""
        self._readings: dict[Sequence, dict[int, _Reading]] = {}
        """By the shelf's number."""
        self._numbers = count()
        self.num_stored = 0
        """Tokens."""

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return 0.0

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        for salt in {sequence.request.root for sequence in sequences}:
            shelf = next((shelf for shelf in self._salts.get(salt, ()) if shelf.waiting), None)
            if shelf is not None:
                shelf.take_in()
        return [self._draft(sequence, num) for sequence, num in zip(sequences, num_tokens, strict=True)]

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""
        if sequence.num_known <= sequence.num_prompt_tokens:
            return
        begin = max(0, sequence.num_prompt_tokens - MAX_CONTEXT)
        text = [*sequence.token_ids[begin : sequence.num_known][: self._max_shelf - 1], _END]
        salt = sequence.request.root
        shelves = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if not shelves or shelves[0].num_tokens + len(text) > self._max_shelf:
            shelves.insert(0, _Shelf(next(self._numbers)))
            self._drop(shelves, 2)
        self.num_stored += len(text)
        while self.num_stored > self._max_stored:
            oldest = next(iter(self._salts))
            if oldest == salt:  # alone, and what it stores now has room without its full one
                self._drop(shelves, 1)
            else:
                self._drop(self._salts.pop(oldest), 0)
        shelves[0].waiting += text

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._readings.pop(sequence, None)

    def _drop(self, shelves: list[_Shelf], num_kept: int) -> None:
        self.num_stored -= sum([shelf.num_tokens for shelf in shelves[num_kept:]])
        del shelves[num_kept:]

    def _draft(self, sequence: Sequence, num_tokens: int) -> Draft:
        shelves = self._salts.get(sequence.request.root)
        if not shelves:
            self._readings.pop(sequence, None)
            return NO_DRAFT
        self._salts.move_to_end(sequence.request.root)
        before = self._readings.get(sequence, {})
        readings = self._readings[sequence] = {}
        known = sequence.token_ids
        best = NO_DRAFT
        for shelf in shelves:
            reading = before.get(shelf.number)
            if reading is None or reading.num_seen < len(known) - MAX_BEHIND:
                reading = _Reading(max(0, len(known) - MAX_BEHIND))
            readings[shelf.number] = reading
            step, state, length = shelf.automaton.step, reading.state, reading.length
            for place in range(reading.num_seen, len(known)):
                state, length = step(state, length, known[place])
            reading.state, reading.length, reading.num_seen = state, length, len(known)
            if length >= MIN_MATCH and length > best.strength:
                end = shelf.automaton.end_of(state)
                text = shelf.automaton.text[end : end + num_tokens]
                token_ids = list(takewhile(lambda token_id: token_id != _END, text))
                if token_ids:
                    best = Draft(token_ids, length)
        return best
