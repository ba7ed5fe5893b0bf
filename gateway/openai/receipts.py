"""What an answer cost and where its time went, for whoever asks: ours, beside OpenAI's fields under one key.

OpenAI's clients keep fields that they do not know, so they read it as ``answer.penstock``.
"""

from __future__ import annotations

import msgspec

from policies.answers import Outcome


class ReceiptAmount(msgspec.Struct, frozen=True):
    """Money, as the ledger's row has it: six digits after the point."""

    value: str
    currency: str

    @classmethod
    def of(cls, micros: int, currency: str) -> ReceiptAmount:
        """``micros`` are millionths of the currency's unit, none below zero."""
        return cls(f"{micros // 1_000_000}.{micros % 1_000_000:06}", currency)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One request's own: the four times add up to ``total_ms``, all others are those of its ledger row."""

    request_id: str
    queue_ms: float
    """It waited in line, and in the worker."""
    prefill_ms: float
    """From there to the first token; of several answers, as before and after, that of the one that took longest."""
    decode_ms: float
    gateway_ms: float
    """The rest: before, between and after, up to this receipt."""
    total_ms: float
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's, found rather than computed."""
    completion_tokens: int
    reasoning_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    """Of the drafted ones."""
    cache: Outcome
    """What the exact cache did; after "hit" and "shared" nothing was computed for this request."""
    engine_seconds: float
    """Its share of every step that it was in."""
    kv_block_seconds: float
    cost: ReceiptAmount
    price_version: str


class PenstockExtras(msgspec.Struct, frozen=True):
    """What an answer has beside OpenAI's."""

    receipt: Receipt
