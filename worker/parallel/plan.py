"""A step's plan on its way to the other ranks: one array of numbers; and a plan cut into parts that follow each other
through the stages.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from worker.adapters import Adapter
from worker.inputs import Span

Copy = tuple[int, int, int]
"""In which pool, from block to block."""
Companion = tuple[int, int]
"""A block and its own, see ``worker.windows``."""

LEAST_PART_TOKENS = 256
"""With fewer, a stage would rather read its weights once: about so many tokens cost as much in multiplying as in
reading. Two parts of 256 pay on a CPU (benchmarks/ranks.md); not measured on CUDA yet."""

_FIELDS = 5


def encoded(copies: Sequence[Copy], spans: Sequence[Span], companions: Sequence[Companion] = ()) -> bytes:
    """Copies come before the pass over the spans."""
    numbers = array("i", (len(copies), len(companions), len(spans)))
    for fields in (*copies, *companions):
        numbers.extend(fields)
    for span in spans:
        number = 0 if span.adapter is None else span.adapter.number
        numbers.extend((len(span.token_ids), span.start, len(span.block_ids), span.num_logits, number))
    for span in spans:
        assert span.source < 0, "the other ranks do not sample"
        numbers.extend(span.token_ids)
        numbers.extend(span.block_ids)
    return numbers.tobytes()


def decoded(data: bytes, adapters: Mapping[int, Adapter]) -> tuple[list[Copy], list[Span], list[Companion]]:
    """What ``encoded`` was given; ``adapters``: by their numbers, all that steps have."""
    numbers = np.frombuffer(data, dtype=np.intc)
    num_copies, num_companions, num_spans = numbers[:3].tolist()
    companions_at = 3 + 3 * num_copies
    heads_at = companions_at + 2 * num_companions
    place = heads_at + _FIELDS * num_spans
    copies = [(pool, source, target) for pool, source, target in numbers[3:companions_at].reshape(-1, 3).tolist()]
    companions = [(block_id, own) for block_id, own in numbers[companions_at:heads_at].reshape(-1, 2).tolist()]
    spans = []
    for num_tokens, start, num_blocks, num_logits, number in numbers[heads_at:place].reshape(-1, _FIELDS).tolist():
        blocks_at = place + num_tokens
        token_ids = numbers[place:blocks_at].tolist()
        place = blocks_at + num_blocks
        adapter = adapters[number] if number else None
        spans.append(Span(token_ids, start, numbers[blocks_at:place].tolist(), num_logits, adapter=adapter))
    assert place == len(numbers)
    return copies, spans, companions


def in_parts(spans: Sequence[Span], most: int, least_tokens: int = LEAST_PART_TOKENS) -> list[list[Span]]:
    """The same tokens in the same order, in at most so many nearly equal parts; a span may be cut in two.

    While a stage computes one part, the next stage computes the part before it. A later part of a span reads what the
    earlier one has written, so parts must be computed in order.
    """
    num_tokens = sum(len(span.token_ids) for span in spans)
    num_parts = max(1, min(most, num_tokens // least_tokens))
    if num_parts == 1:
        return [list(spans)]
    ends = [(part + 1) * num_tokens // num_parts for part in range(num_parts)]
    parts: list[list[Span]] = [[]]
    place = 0
    for span in spans:
        start, length = 0, len(span.token_ids)
        while start < length:
            room = ends[len(parts) - 1] - place
            if not room:
                parts.append([])
                continue
            stop = min(length, start + room)
            # The wanted logits are those of the last tokens; some of these may be in this piece.
            num_logits = max(0, stop - max(start, length - span.num_logits))
            token_ids, first = span.token_ids[start:stop], span.start + start
            parts[-1].append(Span(token_ids, first, span.block_ids, num_logits, adapter=span.adapter))
            place += stop - start
            start = stop
    return parts
