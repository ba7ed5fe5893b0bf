"""Vectors of whole prompts: from hidden states, as steps leave them behind, to what was asked for.

How a model's vectors are meant to be made is what its files say in the layout of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies import wire
from worker.inputs import Span
from worker.scoring import score
from worker.sequence import Sequence
from worker.transfer import Arriving

if TYPE_CHECKING:
    from worker.parallel.runner import ParallelRunner
    from worker.runner import Runner

LAST = wire.Pooling("last")
LEAST_LENGTH = 1e-12
"""What a vector is divided by at least."""


class Finished:
    """Vectors of a step on their way to the host: the next step need not be waited for."""

    def __init__(self, vectors: Run[tuple[Sequence, Tensor]]) -> None:
        """Each [num_dimensions] f32, on the device."""
        self._sequences = [sequence for sequence, _ in vectors]
        self._arriving = Arriving([vector for _, vector in vectors])

    def take(self) -> list[tuple[Sequence, bytes]]:
        """Waits for them. f32, least byte first; none where it is not finite."""
        return list(zip(self._sequences, map(_bytes_of, self._arriving.take()), strict=True))


class Vectors:
    """Those in the making."""

    def __init__(self) -> None:
        self._begun: dict[Sequence, Tensor] = {}
        """What there is so far of those whose prompt is computed in several steps: the sum, or the first row."""

    def take(
        self, spans: Run[Span], batch: Run[tuple[Sequence, int]], runner: Runner | ParallelRunner
    ) -> Finished | None:
        """From the step that this runner has just computed: of the sequences whose prompts end with it, None where
        there are none. What it says of prompts is noted with their requests. If it raises, the step may be computed
        again."""
        wanted = [(sequence, span) for (sequence, _), span in zip(batch, spans, strict=True) if span.num_hidden]
        if not wanted:
            return None
        done = []
        begun: dict[Sequence, Tensor] = {}
        rows = runner.take_hidden([span for _, span in wanted])
        for (sequence, span), hidden in zip(wanted, rows, strict=True):
            if span.pooling is None:
                score(sequence, span, hidden, runner.logits_of)
                continue
            pooled = self._pooled(sequence, span, hidden)
            if span.start + len(span.token_ids) == len(sequence.token_ids):
                done.append((sequence, _finished(pooled, len(sequence.token_ids), span.pooling)))
            else:
                begun[sequence] = pooled
        finished = Finished(done) if done else None
        self._begun |= begun
        for sequence, _ in done:
            self.forget(sequence)
        return finished

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._begun.pop(sequence, None)

    def _pooled(self, sequence: Sequence, span: Span, hidden: Tensor) -> Tensor:
        """Of its tokens so far: [size] f32, or f64 where it is their sum."""
        assert span.pooling is not None
        if span.pooling.kind in ("last", "score"):
            return hidden[-1].float()
        if span.pooling.kind == "first":
            return hidden[0].float() if span.start == 0 else self._begun[sequence]
        pooled = hidden.sum(0, dtype=torch.float64)  # else it would show how the prompt was cut
        if span.start:  # else it begins, perhaps again
            pooled += self._begun[sequence]
        return pooled


def _finished(pooled: Tensor, num_tokens: int, pooling: wire.Pooling | None) -> Tensor:
    assert pooling is not None
    if pooling.kind == "mean":
        pooled = (pooled / num_tokens).float()
    if pooling.num_dimensions:
        pooled = pooled[: pooling.num_dimensions]
    if pooling.is_normalized and pooling.kind != "score":
        pooled = pooled / torch.linalg.vector_norm(pooled).clamp(min=LEAST_LENGTH)
    return pooled


def _bytes_of(vector: Tensor) -> bytes:
    return vector.numpy().astype("<f4", copy=False).tobytes() if bool(vector.isfinite().all()) else b""
