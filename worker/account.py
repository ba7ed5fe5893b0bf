"""What the engine has done: tokens and steps since it began, and whose time a step was."""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import Any

from policies.costs import StepCosts, Work, shares
from worker.flight import work_of
from worker.inputs import Span
from worker.sequence import Sequence


class Account:
    """Counters since start."""

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_generated_tokens = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self._told = (0, 0.0)
        """Steps and busy seconds that the last ``counts`` told of."""

    def gained(self, num_tokens: int) -> None:
        """So many tokens of one answer from one step, all but one of them as its draft foresaw."""
        self.num_generated_tokens += num_tokens
        self.num_decode_tokens += num_tokens - 1

    def spend(
        self,
        seconds: float,
        work: Work,
        spans: Run[Span],
        batch: Run[tuple[Sequence, int]],
        costs: StepCosts,
        now: float,
    ) -> None:
        """A step's time until now, to those who were in it and have not ended meanwhile; if all have, it was
        nobody's."""
        there = [(sequence, span) for (sequence, _), span in zip(batch, spans, strict=True) if not sequence.has_ended]
        if not there:
            return
        self.num_steps += 1
        self.busy_s += seconds
        work = work if len(there) == len(batch) else work_of([span for _, span in there])
        decode_s, context_s, chunk, draft_s = shares(costs.weights, work, seconds)
        decode_s += context_s
        for sequence, span in there:
            if span.is_decode:
                sequence.engine_s += decode_s + context_s * span.start + draft_s * span.num_draft_tokens
            else:
                sequence.engine_s += chunk.seconds(len(span.token_ids), span.start)
                if sequence.timeline is not None:
                    sequence.computed_chunk(len(span.token_ids), seconds, now)

    def counts(self) -> dict[str, Any]:
        """What a worker's ``Stats`` say of it, by field; the mean step is that since the last call."""
        names = ("num_prefill_tokens", "num_decode_tokens", "num_generated_tokens", "num_steps", "busy_s")
        return {"step_ms": self._mean_step_ms(), **{name: getattr(self, name) for name in names}}

    def _mean_step_ms(self) -> float:
        num_steps, busy_s = self.num_steps - self._told[0], self.busy_s - self._told[1]
        self._told = self.num_steps, self.busy_s
        return 1e3 * busy_s / num_steps if num_steps else 0.0
