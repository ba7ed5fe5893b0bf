"""Drafts copied from the sequence's own text: what followed when its last tokens stood there before.

Where a copy changes a token (a name in a text that is rewritten, a value in one more record), it is expected to go on
behind it as what it copies does, so long as a few tokens in a row were the same before. What was changed to what is
remembered, and changed again; and so are the places: a copy of a copy ends where that one was changed, since what
comes there is new each time.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from itertools import takewhile

from worker.sequence import Sequence
from worker.speculation.automaton import NOTHING, SuffixAutomaton
from worker.speculation.drafter import NO_DRAFT, Draft
from worker.speculation.origins import Origins
from worker.speculation.twins import Twins

MIN_MATCH = 2
"""A single token that has occurred before says next to nothing."""
MIN_COPIED = 3
"""Tokens in a row, after which a text is taken to copy what it repeats."""
MIN_TOLD = 4
"""As strong as a copy of so many tokens at least is one of a record, with values of its own."""
MAX_CHANGED = 4
"""Tokens in a row that a copy may change."""
MAX_SKIPPED = 6
"""Tokens of what is copied, among which it goes on behind a change."""
MIN_LONGER = 8
"""So many more tokens are the same at another place before that is copied instead."""
MAX_GLIMPSED = 1024
"""Tokens of a text that is only looked through for three that come again; longer ones have them."""
MAX_BEGUN = 512
"""Tokens of texts that begin to be followed in one step; whoever is in front may have more."""
MAX_TEXT = 8192
"""Tokens of one text that are remembered, or the last half of them at least: some 500 bytes each."""
MAX_TEXTS = 1 << 18
"""Tokens of all of them. Whoever comes when so many are there goes without."""
NEVER = 1 << 62


class SuffixDrafter:
    """A Drafter; one automaton for each sequence."""

    name = "suffix"
    is_free = True

    def __init__(self, twins: Twins | None = None, max_text: int = MAX_TEXT, max_texts: int = MAX_TEXTS) -> None:
        self._twins = twins or Twins()
        self._max_text, self._max_texts = max_text, max_texts
        self._texts: dict[Sequence, _Text] = {}
        self._glimpses: dict[Sequence, _Glimpse] = {}
        self._num_tokens = 0

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return 0.0

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        texts = self._texts
        drafts = []
        num_begun = 0
        for sequence, num in zip(sequences, num_tokens, strict=True):
            text = texts.get(sequence)
            if text is None:
                has_room = num_begun < MAX_BEGUN and self._num_tokens < self._max_texts
                if not has_room or not self._begins(sequence):
                    drafts.append(NO_DRAFT)
                    continue
                num_begun += len(sequence.token_ids)
                # As if it had been said before all else.
                predicted = sequence.predicted_token_ids[: self._max_text // 2]
                text = texts[sequence] = _Text(self._twins, predicted, sequence.num_prompt_tokens)
                self._num_tokens += len(predicted)
            num_before = len(text.automaton.text)
            text.follow(sequence.token_ids, self._max_text)
            self._num_tokens += len(text.automaton.text) - num_before
            drafts.append(text.draft(num))
        return drafts

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._glimpses.pop(sequence, None)
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._num_tokens -= len(text.automaton.text)

    def _begins(self, sequence: Sequence) -> bool:
        """There may be something to copy, now that its last tokens are there."""
        if len(sequence.token_ids) <= MAX_GLIMPSED and not sequence.predicted_token_ids:
            glimpse = self._glimpses.get(sequence)
            if glimpse is None:
                glimpse = self._glimpses[sequence] = _Glimpse()
            if not glimpse.repeats(sequence.token_ids):
                return False
        self._glimpses.pop(sequence, None)
        return True


class _Glimpse:
    """A text of which no three tokens in a row have stood there before, so that there is little to copy: it is known by
    its triples, which cost next to nothing beside an automaton."""

    __slots__ = ("num_seen", "triples")

    def __init__(self) -> None:
        self.num_seen = 0
        self.triples: set[tuple[int, int, int]] = set()

    def repeats(self, token_ids: Run[int]) -> bool:
        """Whether any of its new tokens, with the two before it, was there before."""
        new = token_ids[max(0, self.num_seen - 2) :]
        self.num_seen = len(token_ids)
        triples = list(zip(new, new[1:], new[2:], strict=False))
        num_before = len(self.triples)
        self.triples.update(triples)
        return len(self.triples) < num_before + len(triples)


class _Text:
    __slots__ = (
        "automaton",
        "changed",
        "changed_at",
        "is_copy",
        "num_alike",
        "num_changed",
        "num_copied",
        "num_prompt_tokens",
        "num_seen",
        "origins",
        "source",
        "twins",
    )

    def __init__(self, twins: Twins, predicted_token_ids: Run[int], num_prompt_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self.automaton.extend(predicted_token_ids)
        self.twins = twins
        self.num_prompt_tokens = len(predicted_token_ids) + num_prompt_tokens
        """With what was predicted; NEVER if some of them are not there."""
        self.origins: Origins | None = None
        """As soon as an answer copies itself with changes."""
        self.num_seen = 0
        """Tokens of the sequence."""
        self.source = NOTHING
        """The place in the automaton's text of which the next token would be a copy."""
        self.is_copy = False
        """It goes on behind a change."""
        self.num_alike = self.num_changed = 0
        """Of the last tokens in a row, those that are what is copied, or else those that are not."""
        self.num_copied = 0
        """In all, each change halving it."""
        self.changed: dict[int, int] = {}
        """Tokens that this copy has changed, and to what."""
        self.changed_at: set[int] = set()
        """Places in the automaton's text where a copy has changed something."""

    def follow(self, token_ids: Run[int], max_text: int) -> None:
        new = token_ids[max(self.num_seen, len(token_ids) - max_text) :]
        if len(self.automaton.text) + len(new) > max_text:
            # States cannot be taken away; what is kept is built anew, once in so many tokens as are kept.
            kept = self.automaton.text[-(max_text // 2) :]
            self.automaton = SuffixAutomaton()
            self.automaton.extend(kept if len(new) <= max_text // 2 else ())
            self.source = NOTHING
            self.changed_at.clear()
            self.origins, self.num_prompt_tokens = None, NEVER
        elif self.num_seen + len(new) < len(token_ids):
            self.num_prompt_tokens = NEVER
        self.num_seen = len(token_ids)
        self.automaton.extend(new)
        if self.source != NOTHING:
            self._compare(new)
        if self.origins is not None:
            self.origins.follow()

    def draft(self, num_tokens: int) -> Draft:
        length, end = self.automaton.repeated()
        # Of several places that are alike, that one which it copies.
        if self.source == NOTHING or not self.is_copy or length >= self.num_alike + MIN_LONGER:
            if length < MIN_MATCH:
                self.source = NOTHING
                return NO_DRAFT
            if self.source != end:
                self.changed.clear()
            self.source, self.num_alike, self.num_changed, self.num_copied = end, length, 0, length
            self.is_copy = length >= MIN_COPIED
        text, source = self.automaton.text, self.source
        strength = max(1, length, self.num_copied)
        if self.origins is not None and self.origins.tells(source, num_tokens):
            drafted = self.origins.draft(source, num_tokens, self.changed, self.changed_at)
            return Draft(drafted, max(MIN_TOLD, strength))
        token_ids = text[source : source + num_tokens]
        # Where the repetition runs into the present, it goes on in itself.
        while len(token_ids) < num_tokens:
            token_ids += token_ids[: num_tokens - len(token_ids)]
        if self.changed_at:
            kept = takewhile(lambda place: place not in self.changed_at, range(source, source + num_tokens))
            token_ids = token_ids[: sum(1 for _ in kept)]
        if self.changed:
            token_ids = [self.changed.get(token_id, token_id) for token_id in token_ids]
        return Draft(token_ids, strength)

    def _compare(self, new: Run[int]) -> None:
        """The text has gone on by these."""
        text = self.automaton.text
        for place, token_id in enumerate(new, len(text) - len(new)):
            copied = text[self.source]
            if not self.num_changed and token_id in (copied, self.changed.get(copied)):
                if token_id == copied:
                    self.changed.pop(copied, None)
                self._go_on(self.source)
                continue
            if not self.is_copy:
                self.source = NOTHING
                return
            if self.num_changed:
                self._return(place, token_id)
                if self.source == NOTHING:
                    return
                continue
            if self.source not in self.changed_at:
                self.changed[copied] = token_id
                self.num_copied //= 2
            self.num_alike, self.num_changed = 0, 1
            self.source += 1

    def _go_on(self, place: int) -> None:
        """It is a copy of that one."""
        self.source, self.num_changed = place + 1, 0
        self.num_alike, self.num_copied = self.num_alike + 1, self.num_copied + 1
        self.is_copy = self.is_copy or self.num_alike >= MIN_COPIED

    def _return(self, place: int, token_id: int) -> None:
        """Behind a change: to what is copied, or not yet."""
        text, source = self.automaton.text, self.source
        behind = text[source : min(place, source + MAX_SKIPPED)]
        if token_id in behind:
            self.changed_at.update(range(place - self.num_changed, place))
            if source > self.num_prompt_tokens:
                if self.origins is None:
                    self.origins = Origins(text, self.num_prompt_tokens, self.twins)
                self.origins.change(source - 1, place - self.num_changed)
            self._go_on(source + behind.index(token_id))
            return
        self.num_changed += 1
        if source in self.changed_at:
            self.source += 1
        if self.num_changed > MAX_CHANGED:
            self.source = NOTHING
