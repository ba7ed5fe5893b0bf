"""Which requests are worth a trace: by their trace id, by whoever asked, or for what became of them.

The choice by ratio looks at the trace's id alone (as OpenTelemetry's TraceIdRatioBased does, at its last 56 bits, which
are random by the second level of Trace Context), so all who see the same trace with the same ratio choose the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.journey import Journey
from policies.observing import Tracing
from policies.settings import SlaClass

BITS = 56
TAIL = 32 - BITS // 4
"""Where those begin in a trace's id."""


class SamplerUnknown(ValueError):
    """OTEL_TRACES_SAMPLER, or its argument, says what is no sampler; the message is one sentence."""


class Keeping:
    """The rules of one gateway."""

    def __init__(self, config: Tracing, classes: Mapping[str, SlaClass], environ: Mapping[str, str]) -> None:
        """Raises SamplerUnknown."""
        ratio, self._follows_parent = sampler_of(config, environ)
        self.below = "g" if ratio == 1.0 else f"{round(ratio * (1 << BITS)):014x}"
        """A trace is chosen whose id has at its TAIL what is less than this."""
        self._keeps_errors = config.keep_errors
        self._slower_s = config.keep_slower_s
        self._promised = {name: (each.ttft_ms, each.tpot_ms) for name, each in classes.items() if config.keep_missed}
        """TTFT and TPOT of each class, where it matters that they were kept."""

    def is_sampled(self, trace_id: str, parent_is_sampled: bool | None) -> bool:
        """At its beginning. ``parent_is_sampled``: None: nobody upstream has a trace of it."""
        if parent_is_sampled is not None and self._follows_parent:
            return parent_is_sampled
        return trace_id[TAIL:] < self.below

    def kept_for(self, noted: Journey, status: int) -> str:
        """For what became of it; empty: it is like the others. This is asked of every request, in one go: a call of
        another function costs more here than what it would do."""
        entry = noted.entry
        if (status >= 400 or noted.error or (entry is not None and entry.status >= 400)) and self._keeps_errors:
            return "error"
        if self._slower_s and time.monotonic() - noted.received_at > self._slower_s:
            return "slow"
        if entry is None or (ttft_ms := entry.ttft_ms) is None:
            return ""
        promised = self._promised.get(entry.sla_class)
        if promised is None:
            return ""
        if ttft_ms > promised[0]:
            return "missed"
        num_sequences = entry.num_sequences
        num_gaps = entry.num_completion_tokens - num_sequences
        if num_gaps > 0 and (entry.duration_ms - ttft_ms) * num_sequences > num_gaps * promised[1]:
            return "missed"
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
