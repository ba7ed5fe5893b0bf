"""A plan as tensors: the tokens of all sequences end to end, their positions, their slots in the pool, and the rows to
sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from policies.wire import Pooling
from worker.adapters import Adapter
from worker.attention import Backend, Extent, Numbers, Plan, outlined, slots_of
from worker.transfer import sent


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """To compute now; at least one."""
    start: int
    """Position of the first of them; keys and values of [0, start) are in the blocks already."""
    block_ids: Sequence[int]
    """Block table; covers start + len(token_ids) tokens."""
    num_logits: int
    """Logits wanted after the last n of these tokens: 0, 1, or more to verify a draft, which is all but the first of
    those tokens."""
    source: int = -1
    """The last of these tokens is the one that the step before sampled in this row, and has not been read; -1: all are
    known."""
    adapter: Adapter | None = None
    """What changes the model for it."""
    num_hidden: int = 0
    """Hidden states wanted of the last n of these tokens: for a vector, where no logits are wanted then, or for the
    log-probabilities of a prompt."""
    pooling: Pooling | None = None
    """What becomes of them; None: log-probabilities."""

    @property
    def is_decode(self) -> bool:
        """One token, and perhaps a draft behind it; not a chunk of a prompt."""
        return len(self.token_ids) == 1 or self.num_logits > 1

    @property
    def num_draft_tokens(self) -> int:
        return max(0, self.num_logits - 1)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step, flattened."""

    token_ids: Tensor
    """[num_tokens] i64"""
    positions: Tensor
    """[num_tokens] i64"""
    slots: Tensor
    """[num_tokens] i64: where in the pool the row's key and value go."""
    rows: Tensor
    """[num_logits + num_hidden] i64: the rows whose logits are wanted, and behind them those whose hidden states
    are."""
    beside: Tensor
    """i32: what has come along."""


@dataclass(slots=True)
class Laid:
    """One step, flattened, while it is on the host."""

    token_ids: array[int]
    positions: array[int]
    slots: array[int]
    rows: array[int]
    """These four as in Inputs: i64."""
    extents: list[Extent]
    num_hidden: int
    unknown: list[int]
    """Rows whose tokens the step before has sampled, in its rows ``sources``."""
    sources: list[int]

    def sent(self, device: torch.device, sampled_before: Tensor | None, beside: Numbers) -> Inputs:
        """To the device, all in one upload, ``beside`` [n] i32 too.

        ``sampled_before`` [n] i64, on the device: the tokens of the step before, where a span refers to one.
        """
        parts = (self.token_ids, self.positions, self.slots, self.rows, self.unknown, self.sources)
        wide = np.array(list(chain.from_iterable(parts)), dtype=np.int64)
        numbers = sent(np.concatenate((wide.view(np.int32), beside)), device)
        token_ids, positions, slots, rows, unknown, sources = torch.split(
            numbers[: 2 * len(wide)].view(torch.int64), [len(part) for part in parts]
        )
        if self.unknown:
            fill_in(token_ids, unknown, sources, sampled_before)
        return Inputs(token_ids, positions, slots, rows, numbers[2 * len(wide) :])


def fill_in(token_ids: Tensor, unknown: Tensor, sources: Tensor, sampled_before: Tensor | None) -> None:
    """What the step before has sampled in rows ``sources`` into rows ``unknown``."""
    assert sampled_before is not None, "a token of the step before is asked for, and there was none"
    # Where its logits were unusable there is none, and a device that is asked for the embedding of token -1 is lost to
    # everybody: until that sequence is seen to have failed, any token will do.
    token_ids[unknown] = sampled_before[sources].clamp_(min=0)


def lay_out(spans: Sequence[Span], block_size: int) -> Laid:
    """Spans must not be empty."""
    token_ids, positions, rows = array("q"), array("q"), array("q")
    hidden: list[int] = []
    extents: list[Extent] = []
    unknown: list[int] = []
    sources: list[int] = []
    for span in spans:
        row, start, num_tokens, block_ids = len(token_ids), span.start, len(span.token_ids), span.block_ids
        assert num_tokens >= 1
        assert len(block_ids) * block_size >= start + num_tokens
        extents.append(Extent(row, num_tokens, start, block_ids))
        token_ids.extend(span.token_ids)
        positions.extend(range(start, start + num_tokens))
        rows.extend(range(row + num_tokens - span.num_logits, row + num_tokens))
        if span.num_hidden:
            hidden += range(row + num_tokens - span.num_hidden, row + num_tokens)
        if span.source >= 0:
            unknown.append(row + num_tokens - 1)
            sources.append(span.source)
    rows.extend(hidden)
    return Laid(token_ids, positions, slots_of(extents, block_size), rows, extents, len(hidden), unknown, sources)


def planned(
    laid: Laid, attention: Backend, device: torch.device, sampled_before: Tensor | None = None
) -> tuple[Inputs, Plan]:
    """A step on the device, and its attention: in one upload where that has something to send, too. See Laid."""
    outline = outlined(attention, laid.extents)
    inputs = laid.sent(device, sampled_before, outline.numbers)
    return inputs, outline.plan(inputs.slots, inputs.beside)
