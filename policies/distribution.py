"""A measured quantity as a handful of figures, as both benchmarks report it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

PERCENTS = (50, 90, 95, 99)


class Distribution(msgspec.Struct):
    """One measured quantity over all that have it, in milliseconds."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; ``ordered`` ascending, not empty."""
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values_s: Iterable[float | None]) -> Distribution | None:
    """Seconds in, milliseconds out; None when nothing was measured."""
    ordered = sorted(1e3 * value for value in values_s if value is not None)
    if not ordered:
        return None
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTS)
    return Distribution(len(ordered), statistics.fmean(ordered), p50, p90, p95, p99, ordered[-1])
