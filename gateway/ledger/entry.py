"""A row of the ledger, and what writes rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway import store
from policies.answers import Outcome
from policies.upstreams.counting import CountedBy


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One row; the fields stand in the order of the table's columns."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    status: int
    """HTTP's; 499 when the client went away."""
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_sequences: int
    created_at: int
    """Unix seconds."""
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    sla_class: str
    service_tier: str
    """The one that served it, as OpenAI names it."""
    cache: Outcome
    policy_name: str
    policy_version: int
    """The version that admitted it."""
    cost_micros: int
    """Millionths of the currency's unit."""
    num_reasoning_tokens: int = 0
    """Of the completion's."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of those drafted."""
    engine_us: int = 0
    """Its share of every step that it was in, in microseconds."""
    kv_block_ms: int = 0
    """KV blocks that it held, times milliseconds."""
    price_version: str = ""
    """By which the cost was counted."""
    end_user: str | None = None
    """The client's ``user``."""
    safety_identifier: str | None = None
    metadata: str | None = None
    """The client's, as JSON."""
    trace_id: str | None = None
    corrects: str | None = None
    """The request whose row this one corrects."""
    reason: str | None = None
    """Of a correction."""
    settled_at: int = 0
    """Unix seconds; the day and the period that the row belongs to."""
    chain: int = 0
    position: int = 0
    """In its chain, from 1."""
    link: bytes | None = None
    """SHA-256 over the link before and the row."""
    upstream: str | None = None
    """The one that answered; null where a worker or a cache did."""
    counted_by: CountedBy | None = None
    """Whose count the tokens are, where an upstream answered."""

    @property
    def is_owed(self) -> bool:
        """What failed before anything of it was delivered owes nothing, whatever it took."""
        has_tokens = self.num_prompt_tokens or self.num_completion_tokens
        return bool(has_tokens or self.cost_micros or self.corrects is not None)


assert Entry.__struct_fields__ == tuple(store.ledger.c.keys())


class WriteError(Exception):
    """The rows may not have been written; they can be written again."""


class RowRefused(WriteError):
    """The database is there, and does not take one of the rows: tried again as they are, none will ever be written."""


class Writer(Protocol):
    """One commit after another."""

    async def write(self, entries: Sequence[Entry]) -> None:
        """Returns when the rows are durable. Raises WriteError. Not called again before it has returned."""

    async def close(self) -> None: ...
