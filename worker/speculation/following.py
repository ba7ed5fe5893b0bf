"""The likeliest continuation of several sequences: what a draft model is asked for."""

from __future__ import annotations

from collections.abc import Sequence as Run

import numpy as np
import torch
from torch import Tensor

from worker.attention import Extent, NativePlan
from worker.inputs import Span, lay_out
from worker.models import Whole
from worker.runner import Runner


@torch.inference_mode()
def follow(runner: Runner, spans: Run[Span], num_steps: int) -> Tensor:
    """The spans are computed, then what is likeliest after each that wants logits, and so on; all but the last ones are
    in their slots then. In one call where the compiled kernels compute whole steps.

    Their block tables cover it all, and some want logits, of one token each. Returns [num_steps, n] i64 on the device.
    """
    whole = runner.whole
    return _step_by_step(runner, spans, num_steps) if whole is None else _at_once(runner, whole, spans, num_steps)


def _at_once(runner: Runner, whole: Whole, spans: Run[Span], num_steps: int) -> Tensor:
    size = runner.block_size
    laid = lay_out(spans, size)
    inputs = laid.sent(torch.device("cpu"))
    later = [
        Extent(row, 1, span.start + len(span.token_ids), span.block_ids)
        for row, span in enumerate([span for span in spans if span.num_logits])
    ]
    positions = np.arange(num_steps - 1)[:, None] + [extent.start for extent in later]
    slots = np.empty_like(positions)
    for own, at, extent in zip(slots.T, positions.T, later, strict=True):
        own[:] = np.array(extent.block_ids)[at // size] * size + at % size
    first = runner.attention.plan(laid.extents, inputs.slots)
    more = runner.attention.plan(later, torch.from_numpy(slots))
    assert isinstance(first, NativePlan)
    assert isinstance(more, NativePlan)
    every = torch.cat((inputs.positions, torch.from_numpy(positions.ravel())))
    lengths = torch.from_numpy((positions + 1).astype(np.int32))
    return whole.follow(inputs.token_ids, every, inputs.rows, first, more, lengths)


def _step_by_step(runner: Runner, spans: Run[Span], num_steps: int) -> Tensor:
    chosen = [runner.forward(spans).argmax(-1)]
    ready = [span for span in spans if span.num_logits]
    for step in range(num_steps - 1):
        following = [
            Span([token_id], span.start + len(span.token_ids) + step, span.block_ids, 1)
            for token_id, span in zip(chosen[-1].tolist(), ready, strict=True)
        ]
        chosen.append(runner.forward(following).argmax(-1))
    return torch.stack(chosen)
