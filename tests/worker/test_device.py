"""An error of CUDA's own lasts as long as the process: the worker stops, and no request is blamed."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from policies.settings import Engine
from tests.worker import tiny
from worker import runner as runners
from worker.device import DeviceLost, is_lost, is_out_of_memory
from worker.inputs import Span
from worker.recording import CudaRecord
from worker.runner import Runner


def fail(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


@pytest.mark.parametrize(("device", "lost"), [("cpu", False), ("cuda", True)])
def test_a_device_is_lost_where_it_cannot_even_be_waited_for(device, lost, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert is_lost(torch.device(device)) is lost
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(torch.device(device))


@pytest.mark.parametrize(("lost", "raised"), [(True, DeviceLost), (False, RuntimeError)])
def test_a_step_tells_a_lost_device_from_its_own_fault(lost, raised, tmp_path, monkeypatch):
    tiny.checkpoint(tmp_path, "LlamaForCausalLM")
    engine = Engine(block_size=tiny.BLOCK_SIZE, attention="reference", device="cpu", dtype="float32")
    runner = Runner.load(str(tmp_path), engine)
    model = runner.keep_hidden()
    monkeypatch.setattr(type(model), "forward", fail)
    monkeypatch.setattr(runners, "is_lost", lambda device: lost)
    with pytest.raises(raised, match="illegal memory access"):
        runner.forward([Span([1, 2], 0, [0], 1)])


def of_cuda(error_code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error: as it happens")
    error.error_code = error_code
    return error


@pytest.mark.parametrize(
    ("error", "is_that"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (of_cuda(2), True),
        (of_cuda(700), False),
        (RuntimeError("NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'"), False),
        (ValueError("the shape is off"), False),
    ],
    ids=lambda each: f"{type(each).__name__}: {each}"[:40],
)
def test_memory_that_runs_out_is_known_by_whoever_says_so(error, is_that):
    assert is_out_of_memory(error) == is_that


@pytest.mark.parametrize("ends_itself", [False, True], ids=["torch 2.11", "later"])
def test_a_recording_that_breaks_off_holds_no_memory_and_the_next_is_made(monkeypatch, ends_itself):
    """Whoever records holds the pool, and a graph that was made lets go of it when it is dropped; in later versions of
    torch so does one that was not. Pinned memory has pools of the same names, which nobody else ends recording to."""
    holders, recording, pinned, handles = Counter[int](), set[int](), set[int](), count(1)

    class Graph:
        pool = 0

        def replay(self): ...

        def __del__(self):
            holders[self.pool] -= bool(self.pool)

    @contextmanager
    def graph(own, pool, capture_error_mode):
        holders[pool] += 1
        recording.add(pool)
        if pool in pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        pinned.add(pool)
        is_broken = True
        try:
            yield
            is_broken = False
        finally:
            if ends_itself or not is_broken:
                recording.remove(pool)
                pinned.remove(pool)
                own.pool = pool

    def end(device_index, pool):
        if pool not in recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        recording.remove(pool)

    stream = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
    for name, own in {
        "graph_pool_handle": lambda: next(handles),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda other: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, own)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device_index, pool: holders.subtract([pool]))
    record, calls = CudaRecord(), count()

    def broken():
        if next(calls) % 2:  # the first call is not recorded
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def try_it():
        with pytest.raises(RuntimeError, match="not permitted"):
            record(broken)

    try_it()
    assert not recording
    assert not +holders
    replay = record(lambda: None)
    try_it()
    assert not recording
    assert list((+holders).values()) == [1]
    another = record(lambda: None)
    assert sum((+holders).values()) == 2
    del replay, another
    assert not +holders
