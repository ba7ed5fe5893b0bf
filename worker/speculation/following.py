"""The likeliest continuation of several sequences: what a draft model is asked for."""

from __future__ import annotations

from collections.abc import Sequence as Run

import torch
from torch import Tensor

from worker.attention import Extent, NativePlan
from worker.inputs import Span
from worker.runner import Runner


@torch.inference_mode()
def follow(runner: Runner, token_ids: Tensor, starts: Run[int], tables: Run[Run[int]], num_steps: int) -> Tensor:
    """``token_ids`` [n] i64 at positions ``starts`` are computed, then what is likeliest after them, and so on; all but
    the last ones are in their slots then. In one call where the compiled kernels compute whole steps.

    ``tables``: block tables, which cover it all. Returns [num_steps, n] i64 on the device.
    """
    if runner.whole is None:
        return _step_by_step(runner, token_ids, starts, tables, num_steps)
    positions = torch.arange(num_steps)[:, None] + torch.tensor(starts)
    size = runner.block_size
    slots = torch.tensor(
        [
            [table[at // size] * size + at % size for at, table in zip(row, tables, strict=True)]
            for row in positions.tolist()
        ]
    )
    extents = [Extent(row, 1, start, table) for row, (start, table) in enumerate(zip(starts, tables, strict=True))]
    plan = runner.attention.plan(extents, slots[0])
    assert isinstance(plan, NativePlan)
    lengths = (positions + 1).to(torch.int32)
    return runner.whole.follow(token_ids, positions.flatten(), slots, lengths, plan)


def _step_by_step(runner: Runner, token_ids: Tensor, starts: Run[int], tables: Run[Run[int]], num_steps: int) -> Tensor:
    chosen = []
    for step in range(num_steps):
        spans = [
            Span([token_id], start + step, table, 1)
            for token_id, start, table in zip(token_ids.tolist(), starts, tables, strict=True)
        ]
        token_ids = runner.forward(spans).argmax(-1)
        chosen.append(token_ids)
    return torch.stack(chosen)
