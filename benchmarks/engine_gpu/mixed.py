"""Steps of decodes beside a chunk of a prompt, as a graph and launch by launch."""

from __future__ import annotations

from time import perf_counter

import torch

from benchmarks.engine_gpu.device import finish
from benchmarks.engine_gpu.report import OfMixed
from worker.graphs import NUM_MIXED_BEFORE
from worker.inputs import Span
from worker.runner import Runner

TIMES = 20
"""Steps one behind the other, as a worker gives them to a device: it is waited for behind the last."""


def measured(runner: Runner, num_decodes: int, num_tokens: int, num_chunk: int) -> OfMixed:
    """A step of decodes, each with so many tokens behind it, and of a whole prompt of ``num_chunk``."""
    size = runner.block_size
    num_blocks = -(-(num_tokens + 1) // size)
    assert num_decodes * num_blocks + -(-num_chunk // size) <= runner.num_blocks
    tables = [list(range(each, num_decodes * num_blocks, num_decodes)) for each in range(num_decodes)]
    spans = [Span([1], num_tokens, table, 1) for table in tables]
    first = num_decodes * num_blocks
    spans.append(Span([1] * num_chunk, 0, list(range(first, first - (-num_chunk // size))), 1))
    graphs, runner.graphs = runner.graphs, None
    try:
        launched_s = _step_s(runner, spans)
    finally:
        runner.graphs = graphs
    if graphs is None:
        return OfMixed(1e3 * launched_s, None, None)
    before = set(graphs.recorded)
    for _ in range(NUM_MIXED_BEFORE):
        runner.forward(spans)
    finish(torch.device(runner.device))
    began_at = perf_counter()
    runner.forward(spans)
    finish(torch.device(runner.device))
    recorded_s = perf_counter() - began_at
    assert set(graphs.recorded) != before, "such a step has no graph"
    return OfMixed(1e3 * launched_s, 1e3 * _step_s(runner, spans), 1e3 * recorded_s)


def _step_s(runner: Runner, spans: list[Span]) -> float:
    for _ in range(2):
        runner.forward(spans)
    finish(torch.device(runner.device))
    began_at = perf_counter()
    for _ in range(TIMES):
        runner.forward(spans)
    finish(torch.device(runner.device))
    return (perf_counter() - began_at) / TIMES
