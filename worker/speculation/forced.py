"""A drafter that says what a grammar leaves no choice about: keys of an object, marks between them, the rest of a word.

Such a draft is right whatever the model would say, since the masks of its places allow nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Run

from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft

_CERTAIN = 16
"""The strength of such a draft."""


class ForcedDrafter:
    """It keeps no notes: a sequence's guide knows."""

    name = "grammar"
    is_free = True

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        return 0.0

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        return [
            NO_DRAFT if sequence.guide is None else _draft(sequence.guide.forced(num))
            for sequence, num in zip(sequences, num_tokens, strict=True)
        ]

    def learn(self, sequence: Sequence) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


def _draft(token_ids: list[int]) -> Draft:
    return Draft(token_ids, _CERTAIN) if token_ids else NO_DRAFT
