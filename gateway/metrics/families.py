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
            how = METRICS[name].merge
            for labels, sample in series.items():
                before = families.get(name, {}).get(labels)
                if before is None or how == "sum":
                    _add(families, sample)
                elif how == "max" and sample.value > before.value:
                    families[name][labels] = sample
    return families


def _add(families: Families, sample: Sample) -> None:
    series = families.setdefault(sample.name, {})
    before = series.get(sample.labels)
    if before is None:
        series[sample.labels] = sample
        return
    counts = tuple(map(sum, zip(before.counts, sample.counts, strict=True)))
    series[sample.labels] = msgspec.structs.replace(before, value=before.value + sample.value, counts=counts)
