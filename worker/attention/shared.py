"""Beginnings that several decodes have in common: their blocks are the same, so a step may read them once for all."""

from __future__ import annotations

import numpy as np

from worker.attention.base import Numbers

MIN_SHARERS = 4
MIN_SHARED_TOKENS = 256
"""So many decodes that have so many tokens in common read them together. Fewer are read one by one about as fast."""
SHARED_STEP = 32
"""Keys that the compiled kernel takes at once."""


def beginnings(tables: Numbers, lengths: Numbers, block_size: int) -> tuple[Numbers, Numbers]:
    """Beginnings that enough decodes have in common: [num_shares, 3], the first of its sharers, how many of them, and
    positions; and the sharers, decodes of ``tables`` [num_decodes, width].

    Who has the same block at the end of the shortest beginning that is worth it is taken to begin alike; how far they
    do is then looked up.
    """
    at = -(-MIN_SHARED_TOKENS // block_size) - 1
    alike: dict[int, list[int]] = {}
    if len(tables) >= MIN_SHARERS and at < tables.shape[1]:
        # A sequence that does not reach so far has anything in that place of its table.
        for decode in (lengths > (at + 1) * block_size).nonzero()[0].tolist():
            alike.setdefault(int(tables[decode, at]), []).append(decode)
    shares: list[tuple[int, int, int]] = []
    sharers: list[int] = []
    for decodes in alike.values():
        if len(decodes) < MIN_SHARERS:
            continue
        # What is the same in all tables; their last tokens are their own.
        num_blocks = (int(lengths[decodes].min()) - 1) // block_size
        same = (tables[decodes, :num_blocks] == tables[decodes[0], :num_blocks]).all(0)
        positions = int(same.argmin() if not same.all() else num_blocks) * block_size // SHARED_STEP * SHARED_STEP
        if positions >= MIN_SHARED_TOKENS:
            shares.append((len(sharers), len(decodes), positions))
            sharers += decodes
    return np.array(shares, dtype=np.int32).reshape(-1, 3), np.array(sharers, dtype=np.int32)
