"""Samples put together: those of one series, and those of several gateway processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gateway.metrics.counts import Sample
from gateway.metrics.names import METRICS

Families = dict[str, dict[tuple[str, ...], Sample]]
"""Series by metric, then by labels."""


def gathered(samples: Iterable[Sample]) -> Families:
    """Of one process: what has the same name and labels is one series."""
    families: Families = {}
    for sample in samples:
        _add(families, sample)
    return families


def merged(processes: Sequence[Families]) -> Families:
    """Of all processes, as each metric says."""
    families: Families = {}
    for process in processes:
        for name, series in process.items():
            is_one = METRICS[name].merge == "one"
            for labels, sample in series.items():
                if not (is_one and labels in families.get(name, ())):
                    _add(families, sample)
    return families


def _add(families: Families, sample: Sample) -> None:
    series = families.setdefault(sample.name, {})
    before = series.get(sample.labels)
    series[sample.labels] = sample if before is None else _together(before, sample)


def _together(before: Sample, sample: Sample) -> Sample:
    """Two of one series."""
    how = METRICS[sample.name].merge
    if how in ("max", "min"):
        is_kept = before.value >= sample.value if how == "max" else before.value <= sample.value
        return before if is_kept else sample
    counts = tuple(map(sum, zip(before.counts, sample.counts, strict=True)))
    value = before.value + sample.value
    if how == "mean":
        value = (before.value * before.counts[0] + sample.value * sample.counts[0]) / counts[0]
    return msgspec.structs.replace(before, value=value, counts=counts)
