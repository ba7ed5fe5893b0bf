"""How long sequences took within a worker, by the worker's own clock: counted as they end."""

from __future__ import annotations

from gateway.telemetry import Times
from policies import wire

BOUNDS_MS = (
    *(300.0, 500.0, 800.0, 1000.0, 1500.0, 2000.0, 2500.0, 5000.0, 10_000.0, 15_000.0, 20_000.0, 30_000.0, 40_000.0),
    *(50_000.0, 60_000.0, 120_000.0, 240_000.0, 480_000.0, 960_000.0, 1_920_000.0, 7_680_000.0),
)
"""Those that dashboards for vLLM expect."""


class Phases:
    """Of one worker's place, since start."""

    __slots__ = ("decode", "inference", "prefill")

    def __init__(self) -> None:
        self.prefill = Times(BOUNDS_MS)
        self.decode = Times(BOUNDS_MS)
        self.inference = Times(BOUNDS_MS)
        """Both together."""

    def ended(self, finish: wire.Finish) -> None:
        """One more sequence."""
        prefill_ms, decode_ms = 1e3 * finish.prefill_s, 1e3 * finish.decode_s
        self.prefill.add(prefill_ms)
        self.decode.add(decode_ms)
        self.inference.add(prefill_ms + decode_ms)
