"""The likeliest continuation of several sequences: what a draft model is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Run

from worker.attention import Extent, NativeAttention
from worker.inputs import Span, lay_out
from worker.models import Whole
from worker.runner import Runner


def follow(runner: Runner, spans: Run[Span], num_steps: int) -> list[list[int]]:
    """The spans are computed, then what is likeliest after each that wants logits, and so on; all but the last ones are
    in their slots then. In one call where the compiled kernels compute whole steps.

    Their block tables cover it all, and some want logits, of one token each. Returns [num_steps, n].
    """
    whole = runner.whole
    return _step_by_step(runner, spans, num_steps) if whole is None else _at_once(runner, whole, spans, num_steps)


def _at_once(runner: Runner, whole: Whole, spans: Run[Span], num_steps: int) -> list[list[int]]:
    size, attention = runner.block_size, runner.attention
    assert isinstance(attention, NativeAttention)
    laid = lay_out(spans, size)
    (first,) = attention.steps(laid.extents, laid.slots)
    positions, slots, lengths = laid.positions, array("q"), array("i")
    ready = [span for span in spans if span.num_logits]
    ends = [span.start + len(span.token_ids) for span in ready]
    for step in range(num_steps - 1):
        for span, end in zip(ready, ends, strict=True):
            block, place = divmod(end + step, size)
            positions.append(end + step)
            slots.append(span.block_ids[block] * size + place)
            lengths.append(end + step + 1)
    extents = [Extent(row, 1, end, span.block_ids) for row, (span, end) in enumerate(zip(ready, ends, strict=True))]
    (later,) = attention.steps(extents, slots)
    chosen = whole.follow(laid.token_ids, positions, laid.rows, first, later, lengths)
    return [chosen[at : at + len(ready)] for at in range(0, len(chosen), len(ready))]


def _step_by_step(runner: Runner, spans: Run[Span], num_steps: int) -> list[list[int]]:
    chosen: list[list[int]] = [runner.forward(spans).argmax(-1).tolist()]
    ready = [span for span in spans if span.num_logits]
    for step in range(num_steps - 1):
        following = [
            Span([token_id], span.start + len(span.token_ids) + step, span.block_ids, 1)
            for token_id, span in zip(chosen[-1], ready, strict=True)
        ]
        chosen.append(runner.forward(following).argmax(-1).tolist())
    return chosen
