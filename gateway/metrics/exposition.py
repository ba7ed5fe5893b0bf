"""Families as text, for Prometheus and whoever reads its formats.

Written here: prometheus-client makes an object of each line and looks at its name and labels anew each time, and the
event loop stands still meanwhile. What a line begins with is kept, and so is all that a histogram says until something
is counted in it. Which format is preferred is for prometheus-client to say.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from prometheus_client.exposition import choose_encoder

from gateway.metrics.counts import Sample
from gateway.metrics.families import Families
from gateway.metrics.names import METRICS, Metric

OPENMETRICS = "application/openmetrics-text"
MAX_KNOWN = 16_384
"""Beginnings of lines that are kept."""


class Exposition:
    """Of one process, for as long as it lives."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, tuple[str, ...]], tuple[Sample, str]] = {}
        """Histograms, as they were when somebody asked last."""

    def text(self, families: Families, accept: str) -> tuple[bytes, str]:
        """In the format that ``accept`` prefers, OpenMetrics or Prometheus's own, and its content type."""
        content_type: str = choose_encoder(accept)[1]
        is_open = content_type.startswith(OPENMETRICS)
        before, self._told = self._told, {}
        parts: list[str] = []
        for name, metric in METRICS.items():
            series = families.get(name)
            if not series:
                continue
            parts.append(_head(metric, is_open))
            if metric.kind != "histogram":
                parts += [f"{_beginning(name, labels)}{+sample.value}\n" for labels, sample in series.items()]
                continue
            for labels, sample in series.items():
                known = before.get((name, labels))
                if known is None or known[0] != sample:
                    known = sample, _histogram(sample)
                self._told[name, labels] = known
                parts.append(known[1])
        if is_open:
            parts.append("# EOF\n")
        return "".join(parts).encode(), content_type


def _head(metric: Metric, is_open: bool) -> str:
    """A counter's family has no suffix in OpenMetrics, its samples have."""
    name = metric.name.removesuffix("_total") if is_open and metric.kind == "counter" else metric.name
    return f"# HELP {name} {metric.meaning}\n# TYPE {name} {metric.kind}\n"


def _histogram(sample: Sample) -> str:
    """Counts up to each bound."""
    *buckets, count, total = _beginnings(sample.name, sample.labels, sample.bounds)
    upto = list(accumulate(sample.counts))
    lines = [f"{begins}{num}\n" for begins, num in zip(buckets, upto, strict=True)]
    return f"{''.join(lines)}{count}{upto[-1]}\n{total}{+sample.value}\n"


@lru_cache(MAX_KNOWN)
def _beginning(name: str, labels: tuple[str, ...], suffix: str = "", le: str = "") -> str:
    """All of a line but its value."""
    said = dict(zip(METRICS[name].labels, labels, strict=True))
    if le:
        said["le"] = le
    pairs = ",".join([f'{label}="{_escaped(value)}"' for label, value in sorted(said.items())])
    return f"{name}{suffix}{{{pairs}}} " if pairs else f"{name}{suffix} "


@lru_cache(MAX_KNOWN // 8)
def _beginnings(name: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Of a histogram's lines: for each bound, for the count and for the sum. What arithmetic left behind the twelfth
    digit of a bound is no part of its name."""
    limits = [*(f"{bound:.12g}" for bound in bounds), "+Inf"]
    buckets = [_beginning.__wrapped__(name, labels, "_bucket", le) for le in limits]
    return (*buckets, _beginning(name, labels, "_count"), _beginning(name, labels, "_sum"))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
