"""Where a request's time went and what it cost, as its client is told."""

from __future__ import annotations

from gateway.ledger import Entry
from gateway.openai import Receipt, ReceiptAmount
from gateway.spent import Spent


def receipt(row: Entry, spent: Spent, total_s: float, currency: str) -> Receipt:
    """``total_s``: from the request's arrival to now. What a worker of another host calls a second may be a little more
    than ours: the parts are cut to what there was."""
    left_us = total_us = round(1e6 * total_s)
    parts_ms = []
    for part_s in (spent.queue_s, spent.prefill_s, spent.decode_s):
        part_us = min(left_us, round(1e6 * part_s))
        left_us -= part_us
        parts_ms.append(part_us / 1e3)
    queue_ms, prefill_ms, decode_ms = parts_ms
    return Receipt(
        request_id=row.request_id,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        gateway_ms=left_us / 1e3,
        total_ms=total_us / 1e3,
        prompt_tokens=row.num_prompt_tokens,
        cached_tokens=row.num_cached_tokens,
        completion_tokens=row.num_completion_tokens,
        reasoning_tokens=row.num_reasoning_tokens,
        drafted_tokens=row.num_drafted_tokens,
        accepted_tokens=row.num_accepted_tokens,
        cache=row.cache,
        engine_seconds=row.engine_us / 1e6,
        kv_block_seconds=row.kv_block_ms / 1e3,
        cost=ReceiptAmount.of(row.cost_micros, currency),
        price_version=row.price_version,
    )
