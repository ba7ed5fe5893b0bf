"""Drafts by a small model of the same vocabulary, which writes what is likeliest after the text so far.

It computes as the large one does, with a pool of its own in which every sequence that it is asked for has blocks until
it ends. What it has computed of a draft stays, as far as the draft turned out to be right; so most of the time there is
a token or two to catch up with before it writes on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Run

from worker.inputs import Span
from worker.runner import Runner
from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft
from worker.speculation.following import follow

MAX_CATCH_UP = 512
"""Tokens computed at once before a draft; a longer text is caught up with over several steps, without drafts."""
_LATEST = 8


class _Text:
    """One sequence in the small model's pool."""

    __slots__ = ("ahead", "block_ids", "num_computed")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_computed = 0
        """Of the sequence's own tokens."""
        self.ahead: list[int] = []
        """Computed behind them: a draft of which nothing was known."""


class Durations:
    """What one draft takes: to catch up, and for each further token; by the size of the batch."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._each: dict[int, float] = {}

    def tell(self, num_sequences: int, num_tokens: int, first_s: float, rest_s: float) -> None:
        """It took so long until there was a first token for each, and for all the others."""
        kind = num_sequences.bit_length()
        self._note(self._first, kind, first_s)
        if num_tokens > 1:
            self._note(self._each, kind, rest_s / (num_tokens - 1))

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """Nothing, as long as nothing is known."""
        kind = num_sequences.bit_length()
        return self._nearest(self._first, kind) + (num_tokens - 1) * self._nearest(self._each, kind)

    @staticmethod
    def _note(means: dict[int, float], kind: int, seconds: float) -> None:
        mean = means.get(kind, seconds)
        means[kind] = mean + (min(seconds, 4.0 * mean) - mean) / _LATEST

    @staticmethod
    def _nearest(means: dict[int, float], kind: int) -> float:
        return means[min(means, key=lambda known: abs(known - kind))] if means else 0.0


class ModelDrafter:
    """A Drafter; one model for all sequences, in batches."""

    name = "model"
    is_free = False

    def __init__(self, runner: Runner, now: Callable[[], float], max_catch_up: int = MAX_CATCH_UP) -> None:
        self._runner = runner
        self._max_catch_up = max_catch_up
        self._now = now
        self._texts: dict[Sequence, _Text] = {}
        self._free = list(range(runner.num_blocks))
        self._durations = Durations()

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return self._durations.expected_s(num_sequences, num_tokens)

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        began_at = self._now()
        drafts = [NO_DRAFT] * len(sequences)
        num = max(num_tokens)
        spans = []
        ready: list[tuple[int, _Text]] = []
        num_left = self._max_catch_up
        for place, sequence in enumerate(sequences):
            text = self._texts.get(sequence)
            if text is None:
                text = self._texts[sequence] = _Text()
            known = sequence.token_ids
            _agree(text, known)
            start = text.num_computed
            end = min(len(known), start + num_left)
            if end == start or not self._grow(text, len(known) + num):
                continue
            is_ready = end == len(known)
            spans.append(Span(known[start:end], start, text.block_ids, int(is_ready)))
            text.num_computed = end
            num_left -= end - start
            if is_ready:
                ready.append((place, text))
        if not spans:
            return drafts
        first = self._runner.forward(spans).argmax(-1)
        if not ready:
            return drafts
        first_at = self._now()
        rows = [first.tolist()]
        if num > 1:
            starts = [text.num_computed for _, text in ready]
            rows += follow(self._runner, first, starts, [text.block_ids for _, text in ready], num - 1).tolist()
        for (place, text), *token_ids in zip(ready, *rows, strict=True):
            text.ahead = token_ids[:-1]
            drafts[place] = Draft(token_ids[: num_tokens[place]], 0)
        # A long text that is met for the first time says nothing of what the next draft takes.
        if len(spans) == len(ready) and num_left > self._max_catch_up - 16 * len(spans):
            self._durations.tell(len(ready), num, first_at - began_at, self._now() - first_at)
        return drafts

    def learn(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._free += text.block_ids

    def _grow(self, text: _Text, num_tokens: int) -> bool:
        """Blocks for so many tokens, if there are."""
        size = self._runner.block_size
        num_more = -(-num_tokens // size) - len(text.block_ids)
        if num_tokens > self._runner.max_model_tokens or num_more > len(self._free):
            return False
        for _ in range(num_more):
            text.block_ids.append(self._free.pop())
        return True


def _agree(text: _Text, known: Run[int]) -> None:
    """As much of what was drafted as was right is computed already; but the last token is computed anew, since what
    follows it is asked for."""
    num = text.num_computed
    for token_id in text.ahead:
        if num == len(known) or known[num] != token_id:
            break
        num += 1
    text.num_computed = min(num, len(known) - 1)
    text.ahead = []
