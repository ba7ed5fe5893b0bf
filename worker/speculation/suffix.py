"""Drafts copied from the sequence's own text: what followed when its last tokens stood there before.

Where a copy changes a token (a name in a text that is rewritten, a value in one more record), it is expected to go on
behind it as what it copies does, so long as a few tokens in a row were the same before.
"""

from __future__ import annotations

from collections.abc import Sequence as Run

from worker.sequence import Sequence
from worker.speculation.automaton import NOTHING, SuffixAutomaton
from worker.speculation.drafter import NO_DRAFT, Draft

MIN_MATCH = 2
"""A single token that has occurred before says next to nothing."""
MIN_COPIED = 4
"""Tokens in a row, after which a text is taken to copy what it repeats."""
MAX_CHANGED = 2
"""Tokens in a row that a copy may change."""
MAX_TEXT = 8192
"""Tokens of one text that are remembered, or the last half of them at least: some 500 bytes each."""
MAX_TEXTS = 1 << 18
"""Tokens of all of them. Whoever comes when so many are there goes without."""


class SuffixDrafter:
    """A Drafter; one automaton for each sequence."""

    name = "suffix"
    is_free = True

    def __init__(self, max_text: int = MAX_TEXT, max_texts: int = MAX_TEXTS) -> None:
        self._max_text, self._max_texts = max_text, max_texts
        self._texts: dict[Sequence, _Text] = {}
        self._num_tokens = 0

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return 0.0

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        texts = self._texts
        drafts = []
        for sequence, num in zip(sequences, num_tokens, strict=True):
            text = texts.get(sequence)
            if text is None:
                if self._num_tokens >= self._max_texts:
                    drafts.append(NO_DRAFT)
                    continue
                text = texts[sequence] = _Text()
                # As if it had been said before all else.
                text.automaton.extend(sequence.predicted_token_ids[: self._max_text // 2])
                self._num_tokens += len(text.automaton.text)
            num_before = len(text.automaton.text)
            text.follow(sequence.token_ids, self._max_text)
            self._num_tokens += len(text.automaton.text) - num_before
            drafts.append(text.draft(num))
        return drafts

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._num_tokens -= len(text.automaton.text)


class _Text:
    __slots__ = ("automaton", "num_alike", "num_changed", "num_seen", "source")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.num_seen = 0
        """Tokens of the sequence."""
        self.source = NOTHING
        """The place in the automaton's text of which the next token would be a copy, where it copies."""
        self.num_alike = self.num_changed = 0
        """Of the last tokens in a row, those that are what is copied, or else those that are not."""

    def follow(self, token_ids: Run[int], max_text: int) -> None:
        new = token_ids[max(self.num_seen, len(token_ids) - max_text) :]
        self.num_seen = len(token_ids)
        if len(self.automaton.text) + len(new) > max_text:
            # States cannot be taken away; what is kept is built anew, once in so many tokens as are kept.
            kept = self.automaton.text[-(max_text // 2) :]
            self.automaton = SuffixAutomaton()
            self.automaton.extend(kept if len(new) <= max_text // 2 else ())
            self.source = NOTHING
        self.automaton.extend(new)
        if self.source != NOTHING:
            self._compare(new)

    def draft(self, num_tokens: int) -> Draft:
        length, end = self.automaton.repeated()
        if self.source != NOTHING and (length < MIN_MATCH or length == self.num_alike):
            # Of several places that are alike, that one which it copies.
            end = self.source
        elif length < MIN_MATCH:
            return NO_DRAFT
        elif length >= MIN_COPIED:
            self.source, self.num_alike, self.num_changed = end, length, 0
        text = self.automaton.text
        token_ids = text[end : end + num_tokens]
        # Where the repetition runs into the present, it goes on in itself.
        while len(token_ids) < num_tokens:
            token_ids += token_ids[: num_tokens - len(token_ids)]
        return Draft(token_ids, max(1, length))

    def _compare(self, new: Run[int]) -> None:
        """The text has gone on by these."""
        text = self.automaton.text
        for token_id in new:
            if token_id == text[self.source]:
                self.num_alike, self.num_changed = self.num_alike + 1, 0
            else:
                self.num_alike, self.num_changed = 0, self.num_changed + 1
            self.source += 1
            if self.num_changed > MAX_CHANGED:
                self.source = NOTHING
                return
