"""Which requests are worth a trace: by their trace id, by whoever asked, or for what became of them.

The choice by ratio looks at the trace's id alone (as OpenTelemetry's TraceIdRatioBased does, at its last 56 bits, which
are random by the second level of Trace Context), so all who see the same trace with the same ratio choose the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from gateway.journey import Journey
from gateway.ledger.entry import Entry
from gateway.traceparent import TAIL
from policies.observing import Tracing
from policies.settings import SlaClass

BITS = 56


class SamplerUnknown(ValueError):
    """OTEL_TRACES_SAMPLER, or its argument, says what is no sampler; the message is one sentence."""


class Keeping:
    """The rules of one gateway."""

    def __init__(self, config: Tracing, classes: Mapping[str, SlaClass], environ: Mapping[str, str]) -> None:
        """Raises SamplerUnknown."""
        ratio, self._follows_parent = sampler_of(config, environ)
        self.below = "g" if ratio == 1.0 else f"{round(ratio * (1 << BITS)):014x}"
        """A trace is chosen whose id has at its TAIL what is less than this."""
        self.failures = "error" if config.keep_errors else ""
        """Why they are kept; empty: they are not, as such."""
        self.slower_s = config.keep_slower_s
        """What takes longer is kept; 0: no such rule."""
        self._promised = {
            name: (each.ttft_ms, each.tpot_ms) if config.keep_missed else (math.inf, math.inf)
            for name, each in classes.items()
        }
        """TTFT and TPOT of each class, where it matters that they were kept."""
        slower_ms = 1e3 * self.slower_s or math.inf
        self.quick_ms = min([slower_ms, *(min(promised) for promised in self._promised.values())])
        """What took no longer, times its sequences, kept every promise and is not slow."""

    def is_sampled(self, trace_id: str, parent_is_sampled: bool | None) -> bool:
        """At its beginning. ``parent_is_sampled``: None: nobody upstream has a trace of it."""
        if parent_is_sampled is not None and self._follows_parent:
            return parent_is_sampled
        return trace_id[TAIL] < self.below

    def became(self, row: Entry) -> str:
        """Why a request that nobody has chosen is kept, now that it has its row; empty: it is like the others. This is
        asked of every request, in one go: a call of another function costs more here than what it would do."""
        if row.status >= 400:
            return self.failures
        ttft_ms, duration_ms = row.ttft_ms, row.duration_ms
        if self.slower_s and duration_ms > 1e3 * self.slower_s:
            return "slow"
        if ttft_ms is None:
            return ""
        most_ttft_ms, most_tpot_ms = self._promised[row.sla_class]
        num_sequences = row.num_sequences
        num_gaps = row.num_completion_tokens - num_sequences
        if ttft_ms > most_ttft_ms or (
            (duration_ms - ttft_ms) * num_sequences > num_gaps * most_tpot_ms and num_gaps > 0
        ):
            return "missed"
        return ""

    def at_last(self, noted: Journey, status: int) -> str:
        """The same when it is over: whatever has no row, and what came after that."""
        if status >= 400:
            return self.failures
        if self.slower_s and time.monotonic() - noted.received_at > self.slower_s:
            return "slow"
        return ""


def sampler_of(config: Tracing, environ: Mapping[str, str]) -> tuple[float, bool]:
    """The ratio, and whether the parent's word goes before it. Raises SamplerUnknown."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return config.sample_ratio, config.follow_parent
    of_root = name.removeprefix("parentbased_")
    ratios = {"always_on": 1.0, "always_off": 0.0, "traceidratio": _ratio(environ)}
    if of_root not in ratios:
        raise SamplerUnknown(f"OTEL_TRACES_SAMPLER: {name} is no sampler that is known here")
    return ratios[of_root], of_root != name


def _ratio(environ: Mapping[str, str]) -> float:
    told = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    try:
        ratio = float(told)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise SamplerUnknown(f"OTEL_TRACES_SAMPLER_ARG: {told} is no ratio from 0 to 1")
    return ratio
