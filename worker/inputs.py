"""A plan as tensors: the tokens of all sequences end to end, their positions, their slots in the pool, and the rows to
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policies.wire import Pooling
from worker.adapters import Adapter
from worker.attention import Extent


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
    extents: list[Extent]
    num_hidden: int = 0


def flatten(
    spans: Sequence[Span], block_size: int, device: torch.device, sampled_before: Tensor | None = None
) -> Inputs:
    """One upload for the whole step. Spans must not be empty.

    ``sampled_before`` [n] i64, on the device: the tokens of the step before, where a span refers to one.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    hidden: list[int] = []
    extents: list[Extent] = []
    unknown: list[int] = []
    sources: list[int] = []
    for span in spans:
        row, start, num_tokens, block_ids = len(token_ids), span.start, len(span.token_ids), span.block_ids
        assert num_tokens >= 1
        assert len(block_ids) * block_size >= start + num_tokens
        extents.append(Extent(row, num_tokens, start, block_ids))
        token_ids += span.token_ids
        if num_tokens == 1:
            positions.append(start)
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
        else:
            places = np.arange(start, start + num_tokens)
            positions += places.tolist()
            blocks = np.array(block_ids, dtype=np.int64)[places // block_size]
            slots += (blocks * block_size + places % block_size).tolist()
        rows += range(row + num_tokens - span.num_logits, row + num_tokens)
        if span.num_hidden:
            hidden += range(row + num_tokens - span.num_hidden, row + num_tokens)
        if span.source >= 0:
            unknown.append(row + num_tokens - 1)
            sources.append(span.source)
    rows += hidden
    num_tokens = len(token_ids)
    packed = torch.tensor(token_ids + positions + slots + rows + unknown + sources)
    if device.type == "cuda":
        packed = packed.pin_memory()  # else the upload would wait for the step that is under way
    packed = packed.to(device, non_blocking=True)
    ids_end, positions_end, slots_end = num_tokens, 2 * num_tokens, 3 * num_tokens
    rows_end = slots_end + len(rows)
    if unknown:
        assert sampled_before is not None, "a token of the step before is asked for, and there was none"
        sources_at = rows_end + len(unknown)
        packed[:ids_end][packed[rows_end:sources_at]] = sampled_before[packed[sources_at:]]
    return Inputs(
        token_ids=packed[:ids_end],
        positions=packed[ids_end:positions_end],
        slots=packed[positions_end:slots_end],
        rows=packed[slots_end:rows_end],
        extents=extents,
        num_hidden=len(hidden),
    )
