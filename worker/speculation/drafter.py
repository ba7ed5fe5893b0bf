"""What a drafter is: whoever guesses the next tokens of sequences.

A guess is verified by the model itself, in the step that computes the sequence's next token anyway: at each position
it samples as it would have without, and what it sampled counts as long as the guess says the same. So a drafter may
say anything; being wrong costs time, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import NamedTuple, Protocol, runtime_checkable

from worker.sequence import Sequence


class Draft(NamedTuple):
    """A guess."""

    token_ids: list[int]
    """What follows the sequence's last token; may be empty."""
    strength: int
    """How much speaks for the first of them, by the drafter's own measure (the length of a match); for each further
    one it is one more. Drafts of equal strength are expected to be right equally often."""


NO_DRAFT = Draft([], 0)


class Drafter(Protocol):
    """It is asked between steps, when all tokens of a sequence are known. What became of its last draft it sees by
    them: they only ever grow. It may keep notes on a sequence until told to forget it. It may raise, and is then not
    asked for that sequence again.
    """

    name: str
    """For settings, logs and statistics."""
    is_free: bool
    """A draft takes next to no time, so it is asked for whether or not it will be used."""

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """What it takes to propose so many tokens for each of so many sequences; asked only where it is not free."""
        ...

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """For each sequence at most so many tokens, which is one or more."""
        ...

    def learn(self, sequence: Sequence) -> None:
        """It has ended and is still what it was; it may never have been asked for. Must not raise."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or is not asked for any more; it may never have been."""
        ...


@runtime_checkable
class Watcher(Drafter, Protocol):
    """A drafter that is told of each step, too."""

    def computed(self, batch: Run[tuple[Sequence, int]]) -> None:
        """The target has just computed so many tokens of each, and the draft of each behind them; called before any of
        it is noted on them. If it raises, it is not told of anything any more, unless memory was short."""
        ...

    def watch(self, sequences: Run[Sequence], rows: Run[int]) -> None:
        """The next token of each is about to be sampled by these rows of what the target has just computed, and the one
        after each token of its draft: consecutive rows, sequence by sequence. If it raises, as above."""
        ...
