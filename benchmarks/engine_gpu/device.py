"""What the device itself can do, and how much of its time it computes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, times: int) -> float:
    """The median call of so many, after two that warm up; on a GPU by its own clock."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        return median(_one_s(call) for _ in range(times))
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    finish(device)
    took_ms: list[float] = [begin.elapsed_time(end) for begin, end in pairs]
    return median(took_ms) / 1e3


def _one_s(call: Callable[[], object]) -> float:
    began_at = perf_counter()
    call()
    return perf_counter() - began_at


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Read and written together, by a copy of so many bytes."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device, 20)


class Busy:
    """The share of a span of time in which some kernel ran; as a context around it. CUDA only."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._profile: Any = None
        if torch.cuda.is_available():
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __enter__(self) -> Busy:
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__enter__()
            self._began_at = perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is None:
            return
        torch.cuda.synchronize()
        duration_s = perf_counter() - self._began_at
        self._profile.__exit__(*error)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]
        self.share = covered(spans) / 1e6 / duration_s


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union: kernels may run beside each other."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
