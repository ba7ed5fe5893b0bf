"""Steps of decodes as CUDA graphs: launched as one, where launching each kernel would take the host longer than the
device takes to compute it.

A graph is recorded for a bucket of batch sizes once that bucket has been met a few times, between two steps, so a
worker serves from its first second and the sizes that matter come first. It reads and writes the same memory each
time; a step is copied in, replayed, and its logits lie where the last ones lay. Whatever is no pure decode, or has no
graph yet, is computed as ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from worker.inputs import Inputs
from worker.models import Decoder, Ops

if TYPE_CHECKING:
    from worker.attention.paged import TritonAttention
    from worker.attention.paged_plan import TritonPlan

NUM_STEPS_BEFORE = 4
"""Of a bucket, computed as ever before it is worth a graph."""
_SIZES = (1, 2, 4, 8, 12, *range(16, 257, 16), *range(288, 1025, 32))

Replay = Callable[[], object]

log = logging.getLogger(__name__)


class Record(Protocol):
    """Runs a function whose tensors stay where they are, and returns what repeats it."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


class CudaRecord:
    """All graphs share one pool of memory for what is in between: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """See Record."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()  # whatever is compiled or allocated once only
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Recording:
    token_ids: Tensor
    positions: Tensor
    plan: TritonPlan
    replay: Replay


class DecodeGraphs:
    """The recordings of one model."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        attention: TritonAttention,
        max_model_tokens: int,
        max_sequences: int,
        record: Record,
    ) -> None:
        self._model, self._ops, self._attention, self._record = model, ops, attention, record
        self._table_width = -(-max_model_tokens // attention.cache.block_size)
        self._buckets = [size for size in _SIZES if size <= max_sequences]
        # One for all: each is read before the next step is replayed.
        size = (self._buckets[-1], model.architecture.vocab_size)
        self._logits = torch.empty(size, device=model.device)
        self._num_met: Counter[int] = Counter()
        self._recordings: dict[int, _Recording] = {}
        self._refused: set[int] = set()

    @property
    def recorded(self) -> list[int]:
        """The buckets that have a graph."""
        return sorted(self._recordings)

    def run(self, inputs: Inputs) -> Tensor | None:
        """[num_logits, vocab_size] f32, until the next call; None where there is no graph for such a step."""
        num = len(inputs.extents)
        if len(inputs.token_ids) != num or len(inputs.rows) != num:
            return None
        bucket = next((size for size in self._buckets if size >= num), None)
        if bucket is None or bucket in self._refused:
            return None
        recording = self._recordings.get(bucket)
        if recording is None:
            self._num_met[bucket] += 1
            if self._num_met[bucket] <= NUM_STEPS_BEFORE:
                return None
            recording = self._make(bucket)
            if recording is None:
                return None
        recording.plan.refill(inputs.extents, inputs.slots)
        recording.token_ids[:num].copy_(inputs.token_ids)
        recording.positions[:num].copy_(inputs.positions)
        recording.replay()
        return self._logits[:num]

    def _make(self, bucket: int) -> _Recording | None:
        """None, once and for all, where it cannot be recorded; serving goes on without."""
        plan = self._attention.fixed(bucket, 1, self._table_width)
        rows = torch.arange(bucket, device=self._model.device)
        token_ids, positions = torch.zeros_like(rows), torch.zeros_like(rows)

        def run() -> None:
            self._logits[:bucket].copy_(self._model.forward(token_ids, positions, rows, plan, self._ops))

        try:
            replay = self._record(run)
        except RuntimeError as error:
            self._refused.add(bucket)
            log.warning("steps of %d decodes go without a graph: %s", bucket, str(error).partition("\n")[0])
            return None
        recording = self._recordings[bucket] = _Recording(token_ids, positions, plan, replay)
        return recording
