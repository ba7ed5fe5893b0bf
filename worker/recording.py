"""How CUDA graphs are recorded, and what they take."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

TIMES = 3
"""That each of several recordings of a step is tried."""

Replay = Callable[[], object]


class Record(Protocol):
    """Runs a function whose tensors stay where they are, and returns what repeats it."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...

    def seconds(self, replay: Replay) -> float:
        """That it takes, waiting for it."""
        ...


class CudaRecord:
    """Graphs share a pool of memory for what is in between: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """Those that are recorded and not dropped."""
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Replay:
        """See Record."""
        stream = torch.cuda.current_stream()
        self._beside.wait_stream(stream)
        try:
            with torch.cuda.stream(self._beside):
                run()  # whatever is compiled or allocated once only
        finally:
            stream.wait_stream(self._beside)
        if not self._graphs:
            # torch takes no pool again of which all graphs are gone.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Others may use the device meanwhile; and where recording fails, torch leaves its own stream current.
            with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except BaseException:
            # Nor does it, up to 2.11, stop allocating there and let go of the pool, which would keep all that it has
            # taken for ever; where it has stopped, it says so.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
                torch._C._cuda_releasePool(stream.device_index, self._pool)
                # Of pinned memory it goes on to, and cannot be told; no other graph is recorded in that pool.
                self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph.replay

    def seconds(self, replay: Replay) -> float:
        """See Record; the fastest of a few."""
        took_ms: list[float] = []
        for _ in range(TIMES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            replay()
            end.record()
            end.synchronize()
            took_ms.append(begin.elapsed_time(end))
        return min(took_ms) / 1e3
