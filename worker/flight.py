"""A step that the device has been given, and whose tokens have not been read yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from policies.costs import Work, pairs
from policies.wire import TokenLogprob
from worker.inputs import Span
from worker.sampler import Sampled
from worker.sequence import Sequence

if TYPE_CHECKING:
    from worker.sampler import Pending
    from worker.vectors import Finished


NO_WORK = Work(0, 0, 0)


class Gain(NamedTuple):
    """What one sequence has gained in a step."""

    sequence: Sequence
    position: int
    """Of the first of its new tokens."""
    draft: list[int]
    token_ids: list[int]
    """As sampled, as far as the draft foresaw them, and the one after; below 0 where the logits were unusable."""
    logprobs: list[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class Draw:
    """Sequences that were sampled together, and where in each its token belongs: behind the last one, and behind each
    token of a draft."""

    sequences: Run[Sequence]
    positions: list[int]
    """Of the first of each one's tokens; below 0: none is, of one that is drawn again."""
    drafts: list[list[int]]
    pending: Pending | Sampled

    def runs(self, sampled: Sampled) -> Iterator[Gain]:
        """What came of it."""
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        at = 0
        for sequence, position, draft in zip(self.sequences, self.positions, self.drafts, strict=True):
            end = at + 1
            for token_id in draft:
                if token_ids[end - 1] != token_id:
                    break
                end += 1
            if position >= 0:
                yield Gain(sequence, position, draft, token_ids[at:end], logprobs[at:end])
            at += 1 + len(draft)


@dataclass(frozen=True, slots=True)
class Flight:
    """One step."""

    batch: list[tuple[Sequence, int]]
    """Everybody who is in it, each with a number of tokens."""
    spans: list[Span]
    work: Work
    draws: list[Draw]
    started_at: float
    vectors: Finished | None = None
    """Of those that have one with this step."""

    @property
    def may_be_overtaken(self) -> bool:
        """The next step can be planned before this one's tokens are known: they lie in one row, there is one for each
        sequence, and nothing but the model depends on them.
        """
        return len(self.draws) <= 1 and not any(
            draft or sequence.samples_by_output
            for draw in self.draws
            for sequence, draft in zip(draw.sequences, draw.drafts, strict=True)
        )

    def sampled(self) -> Tensor:
        """The tokens of its one draw, on the device, which has not been waited for."""
        pending = self.draws[0].pending
        assert not isinstance(pending, Sampled), "a device that computes by itself has its tokens on the host"
        return pending.token_ids

    def sources(self) -> dict[Sequence, int]:
        """The row in which each sequence's token was sampled; of a flight that may be overtaken."""
        return {sequence: row for draw in self.draws for row, sequence in enumerate(draw.sequences)}


NO_SOURCES: Mapping[Sequence, int] = {}


def span_of(sequence: Sequence, num_tokens: int, sources: Mapping[Sequence, int] = NO_SOURCES) -> Span:
    """So many tokens of it, and its draft. ``sources``: those of the flight that this step overtakes."""
    start = sequence.num_computed
    end = start + num_tokens
    pooling = sequence.pooling
    if pooling is not None:
        token_ids, adapter = sequence.token_ids[start:end], sequence.request.adapter
        num_hidden = num_tokens if pooling.kind in ("mean", "first") else int(end == len(sequence.token_ids))
        return Span(token_ids, start, sequence.block_ids, 0, -1, adapter, num_hidden, pooling)
    token_ids, draft = sequence.token_ids[start:end], sequence.draft_token_ids
    num_logits = 1 + len(draft) if end == len(sequence.token_ids) else 0
    source = sources[sequence] if end > sequence.num_known else -1
    token_ids = token_ids + draft if draft else token_ids
    adapter, scored, num_hidden = sequence.request.adapter, sequence.request.scored, 0
    if scored is not None and max(start, len(scored)) < min(end, sequence.num_prompt_tokens - 1):
        num_hidden = end - max(start, len(scored))
    return Span(token_ids, start, sequence.block_ids, num_logits, source, adapter, num_hidden)


def work_of(spans: Run[Span]) -> Work:
    """A span of one token counts as a decode, as it does for the planner; so does one with a draft behind it."""
    num_prefill_tokens = num_decodes = num_decode_context_tokens = num_prefill_pairs = 0
    num_chunks = num_chunk_context_tokens = num_draft_tokens = 0
    for span in spans:
        num_tokens = len(span.token_ids)
        if span.is_decode:
            num_decodes += 1
            num_draft_tokens += span.num_draft_tokens
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
        num_draft_tokens,
    )
