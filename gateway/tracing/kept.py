"""A request that is over and worth its spans, on its way to the process that makes them (``collector``).

These messages know nothing of the rest of the gateway, so that process need not load it.
"""

from __future__ import annotations

import struct

import msgspec

from gateway.stays import Stay
from policies import wire
from policies.terms import Sampling

LENGTH = struct.Struct(">I")
"""Before each message, as many bytes as it has."""
SHUTDOWN_S = 2.0
"""For what waits when the gateway ends; the rest is dropped."""


class Row(msgspec.Struct, array_like=True):
    """Of its ledger row, what a trace tells, under the names of ``Entry``."""

    endpoint: str
    status: int
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int
    num_sequences: int
    ttft_ms: float | None
    sla_class: str
    service_tier: str
    cache: str
    policy_name: str
    policy_version: int
    cost_micros: int
    engine_us: int
    kv_block_ms: int
    upstream: str | None


class Asked(msgspec.Struct, array_like=True):
    """What a client wants of a model, beside how it is sampled."""

    model: str
    """That is served here."""
    streams: bool
    seed: int | None
    service_tier: str | None
    output_type: str | None
    """As the conventions call it; None: nothing was said of it."""


class Ride(msgspec.Struct, array_like=True):
    """One prompt's way to its answer."""

    submitted_at: float
    first_token_at: float | None
    num_prompt_tokens: int
    num_tokens: int
    has_grammar: bool
    stays: list[Stay]
    told: list[wire.Finish]
    """What workers said at the end of its sequences."""


class Kept(msgspec.Struct, array_like=True):
    """Instants are monotonic seconds; one that is 0 has not come. The first fields are a ``Journey``'s, under its
    names."""

    traceparent: str
    parent_id: str
    state: str
    received_at: float
    started_at: float
    parse_at: float
    load_at: float
    render_at: float
    cache_at: float
    admit_at: float
    queue_at: float
    settle_at: float
    replay_at: float
    kind: str
    """request, line (of a batch) or background."""
    error: str
    """What the failure is called; empty: there was none."""
    batch: str
    follows: str
    kept_for: str
    unix_s: float
    """Of the monotonic instant 0."""
    ended_at: float
    method: str
    route: str
    """As it is served here; empty: nothing is."""
    status: int
    request_id: str
    lag_ms: float
    """How late the event loop was about then."""
    num_flights: int
    """Rides that there were; the first of them are told of."""
    rides: list[Ride]
    tenant_id: str
    """Whoever asked, as is the next; empty: nobody knows."""
    key_id: str
    asked: Asked | None
    """None: it did not come so far."""
    sampling: Sampling | None
    row: Row | None
    response_id: str
    fingerprint: str
    prompt: str
    completion: str

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        return self.traceparent[36:52]


class Count(msgspec.Struct, array_like=True, frozen=True):
    """What became of the spans so far, as the process says when it has changed."""

    num_exported: int = 0
    num_dropped: int = 0
    """There was no room for them."""
    num_failed: int = 0
    """The collector did not take them."""
    trouble: str = ""
    """Why the last ones were not taken; empty: they were."""
