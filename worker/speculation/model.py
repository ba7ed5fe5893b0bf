"""Drafts by a small model of the same vocabulary, which writes what is likeliest after the text so far.

It computes as the large one does, with a pool of its own in which every sequence that it is asked for has blocks until
it ends. What it has computed of a draft stays, as far as the draft turned out to be right; so most of the time there is
a token or two to catch up with before it writes on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Run
from statistics import median

from worker.inputs import Span
from worker.runner import Runner
from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft
from worker.speculation.following import follow

MAX_CATCH_UP = 512
"""Tokens computed at once before a draft; a longer text is caught up with over several steps, without drafts."""
_LATEST = 8
_REHEARSED, _REHEARSED_DRAFT = 16, 9
"""Tokens of a text, and of a draft, before there is anybody to draft for."""
_NUM_REHEARSALS = 3
"""Of which the middle one counts."""
_SURPRISE = 4.0
"""A draft so many times as long as expected teaches only as much as this."""


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
        self._known: dict[int, tuple[float, float]] = {}

    def begin(self, num_sequences: int, first_s: float, each_s: float) -> None:
        """It was tried how long it takes until there is a first token for each, and for each one more."""
        self._known[num_sequences.bit_length()] = first_s, each_s

    def tell(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """So many tokens for each took so long."""
        expected_s = self.expected_s(num_sequences, num_tokens)
        if expected_s <= 0.0:
            return self.begin(num_sequences, seconds / num_tokens, seconds / num_tokens)
        first_s, each_s = self._nearest(num_sequences)
        share = 1 / _LATEST if num_sequences.bit_length() in self._known else 1.0
        scale = 1.0 + (min(seconds / expected_s, _SURPRISE) - 1.0) * share
        self.begin(num_sequences, scale * first_s, scale * each_s)

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """Nothing, as long as nothing is known."""
        first_s, each_s = self._nearest(num_sequences)
        return first_s + (num_tokens - 1) * each_s

    def _nearest(self, num_sequences: int) -> tuple[float, float]:
        kind, known = num_sequences.bit_length(), self._known
        if kind not in known and known:
            kind = min(known, key=lambda other: abs(other - kind))
        return known.get(kind, (0.0, 0.0))


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

    def rehearse(self) -> None:
        """Begin to know what a draft takes; whatever is made on first use is made now."""
        size = self._runner.block_size
        num_blocks = -(-(_REHEARSED + _REHEARSED_DRAFT) // size)
        if num_blocks > len(self._free):
            return
        block_ids = self._free[:num_blocks]
        text = Span([0] * _REHEARSED, 0, block_ids, 1)
        follow(self._runner, [text], 1)
        follow(self._runner, [text], _REHEARSED_DRAFT)
        last = Span([0], _REHEARSED - 1, block_ids, 1)
        first_s, all_s = (
            median([self._duration_s(last, num) for _ in range(_NUM_REHEARSALS)]) for num in (1, _REHEARSED_DRAFT)
        )
        self._durations.begin(1, first_s, max(0.0, all_s - first_s) / (_REHEARSED_DRAFT - 1))

    def _duration_s(self, span: Span, num_tokens: int) -> float:
        began_at = self._now()
        follow(self._runner, [span], num_tokens)
        return self._now() - began_at

    def expected_s(self, num_sequences: int, num_tokens: int) -> float:
        """See Drafter."""
        return self._durations.expected_s(num_sequences, num_tokens)

    def propose(self, sequences: Run[Sequence], num_tokens: Run[int]) -> list[Draft]:
        """See Drafter."""
        began_at = self._now()
        drafts = [NO_DRAFT] * len(sequences)
        num = max(num_tokens)
        spans: list[Span] = []
        computed: list[tuple[_Text, int]] = []
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
            computed.append((text, end))
            num_left -= end - start
            if is_ready:
                ready.append((place, text))
        if not spans:
            return drafts
        rows: list[list[int]] = []
        if ready:
            rows = follow(self._runner, spans, num)
        else:
            self._runner.forward(spans)
        # Not before, since it may raise, and each of them is then asked for alone.
        for text, end in computed:
            text.num_computed = end
        for (place, text), *token_ids in zip(ready, *rows, strict=True):
            text.ahead = token_ids[:-1]
            drafts[place] = Draft(token_ids[: num_tokens[place]], 0)
        # A long text that is met for the first time says nothing of what the next draft takes.
        if len(spans) == len(ready) and num_left > self._max_catch_up - 16 * len(spans):
            self._durations.tell(len(ready), num, self._now() - began_at)
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
