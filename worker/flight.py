"""A step that the device has been given, and whose tokens have not been read yet."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.costs import Work, pairs
from worker.inputs import Span
from worker.sequence import Sequence

if TYPE_CHECKING:
    from worker.sampler import Pending


NO_WORK = Work(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Draw:
    """Sequences that were sampled together, and where in each its token belongs."""

    sequences: Run[Sequence]
    positions: list[int]
    pending: Pending


@dataclass(frozen=True, slots=True)
class Flight:
    """One step."""

    batch: list[tuple[Sequence, int]]
    """Everybody who is in it, each with a number of tokens."""
    spans: list[Span]
    work: Work
    draws: list[Draw]
    started_at: float

    @property
    def may_be_overtaken(self) -> bool:
        """The next step can be planned before this one's tokens are known: they lie in one row, and nothing but the
        model depends on them.
        """
        return len(self.draws) <= 1 and not any(
            sequence.samples_by_output for draw in self.draws for sequence in draw.sequences
        )

    def sources(self) -> dict[Sequence, int]:
        """The row in which each sequence's token was sampled; of a flight that may be overtaken."""
        return {sequence: row for draw in self.draws for row, sequence in enumerate(draw.sequences)}


def spans_of(batch: Run[tuple[Sequence, int]], sources: Mapping[Sequence, int]) -> list[Span]:
    """What is to be computed; ``sources`` as ``Flight.sources`` says, of a step whose tokens are not known."""
    spans = []
    for sequence, num_tokens in batch:
        start = sequence.num_computed
        end = start + num_tokens
        num_logits = int(end == len(sequence.token_ids))
        source = sources[sequence] if end > sequence.num_known else -1
        adapter = sequence.request.adapter
        spans.append(Span(sequence.token_ids[start:end], start, sequence.block_ids, num_logits, source, adapter))
    return spans


def work_of(spans: Run[Span]) -> Work:
    """A span of one token counts as a decode, as it does for the planner."""
    num_prefill_tokens = num_decodes = num_decode_context_tokens = num_prefill_pairs = 0
    num_chunks = num_chunk_context_tokens = 0
    for span in spans:
        num_tokens = len(span.token_ids)
        if num_tokens == 1:
            num_decodes += 1
            num_decode_context_tokens += span.start + 1
        else:
            num_prefill_tokens += num_tokens
            num_prefill_pairs += pairs(num_tokens, span.start)
            num_chunks += 1
            num_chunk_context_tokens += span.start
    return Work(
        num_prefill_tokens,
        num_decodes,
        num_decode_context_tokens,
        num_prefill_pairs,
        num_chunks,
        num_chunk_context_tokens,
    )
