"""The CPU's attention where the compiled kernels are: decodes and chunks of prompts in one call a layer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention import shared
from worker.attention.base import Extent, Scores
from worker.kv_cache import KVCache
from worker.native import DTYPES, MAX_HEAD_DIM, STORED_TYPES, Library, Step

MAX_DECODE_TOKENS, MAX_TILED_DECODE_TOKENS = 2, 1
"""An extent of so many tokens (one, or a short draft to verify) is as cheap row by row as it is as a chunk; where tiles
score and mix, only one alone is."""


class NativeAttention:
    """A Backend for the CPU; see ``serves`` for which pools."""

    def __init__(
        self, cache: KVCache, scores: Scores, library: Library, num_heads: int, is_repeatable: bool = False
    ) -> None:
        """``is_repeatable``: a row gets the same bits whatever else is in the step, and however its sequence is cut
        into steps. Then all rows are computed as those of chunks are."""
        self._cache, self._scores, self._library = cache, scores, library
        is_tiled = library.has_tiles and cache.keys[0].dtype in (torch.bfloat16, torch.int8)
        num_kv_heads, num_slots, head_dim = cache.keys[0].shape
        self._always = Step(
            row_stride=(num_heads + 2 * num_kv_heads) * head_dim,
            num_slots=num_slots,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=cache.block_size,
            scale=scores.scale,
            softcap=scores.softcap,
            is_repeatable=is_repeatable,
        )
        self._max_decode_tokens = 0 if is_repeatable else MAX_TILED_DECODE_TOKENS if is_tiled else MAX_DECODE_TOKENS

    @staticmethod
    def serves(cache: KVCache, dtype: torch.dtype | None = None) -> bool:
        """Whether the kernels can read this pool, for queries of ``dtype`` (None: the pool's)."""
        head_dim, own = cache.keys[0].shape[2], cache.keys[0].dtype
        is_known = (dtype or own) in DTYPES and (own in STORED_TYPES or own is (dtype or own))
        return is_known and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM

    def plan(self, extents: Sequence[Extent], slots: Tensor) -> NativePlan:
        step = self._step_of(extents, slots.data_ptr(), len(slots))
        step.held = slots, step.held
        return NativePlan(self._cache, self._scores, self._library, step)

    def steps(self, extents: Sequence[Extent], slots: array[int]) -> list[Step]:
        """What the kernels are told of a plan, of each pool."""
        step = self._step_of(extents, *slots.buffer_info())
        step.held = slots, step.held
        return [step]

    def _step_of(self, extents: Sequence[Extent], slots_at: int, num_tokens: int) -> Step:
        """All but the slots, which are at that address, it holds. Where nothing is shared, there is nothing of numpy's
        or torch's: behind a step that has read all weights their code is far away."""
        decodes = [extent for extent in extents if extent.num_tokens <= self._max_decode_tokens]
        rows, lengths, tables = array("i"), array("i"), array("i")
        width = _width(decodes)
        for row, count, start, block_ids in decodes:
            for place in range(count):
                rows.append(row + place)
                lengths.append(start + place + 1)
                _add_table(tables, block_ids, width)
        step = Step.from_buffer_copy(self._always)
        step.num_tokens, step.slots = num_tokens, slots_at
        step.num_decodes, step.rows, step.lengths = len(rows), rows.buffer_info()[0], lengths.buffer_info()[0]
        step.tables, step.table_stride = tables.buffer_info()[0], width
        step.threads = torch.get_num_threads()
        step.held = rows, lengths, tables
        if len(rows) >= shared.MIN_SHARERS:
            of_decodes = np.frombuffer(tables, dtype=np.int32).reshape(len(rows), width)
            shares, sharers = shared.beginnings(
                of_decodes, np.frombuffer(lengths, dtype=np.int32), self._cache.block_size
            )
            step.num_shares, step.shares, step.sharers = len(shares), shares.ctypes.data, sharers.ctypes.data
            step.held += shares, sharers
        if len(decodes) < len(extents):
            chunks = [extent for extent in extents if extent.num_tokens > self._max_decode_tokens]
            places, chunk_tables, width = array("i"), array("i"), _width(chunks)
            for row, count, start, block_ids in chunks:
                places.extend((row, count, start))
                _add_table(chunk_tables, block_ids, width)
            step.num_chunks, step.chunks = len(chunks), places.buffer_info()[0]
            step.chunk_tables, step.chunk_table_stride = chunk_tables.buffer_info()[0], width
            step.held += places, chunk_tables
        return step


def _width(extents: Sequence[Extent]) -> int:
    return max([len(extent.block_ids) for extent in extents], default=0)


def _add_table(tables: array[int], block_ids: Sequence[int], width: int) -> None:
    tables.extend(block_ids)
    tables.frombytes(bytes(tables.itemsize * (width - len(block_ids))))


@dataclass(frozen=True, slots=True)
class NativePlan:
    cache: KVCache
    scores: Scores
    library: Library
    step: Step

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See Plan."""
        assert queries.stride(0) == keys.stride(0) == values.stride(0) == self.step.row_stride
        out = queries.new_empty((len(queries), queries.shape[1] * queries.shape[2]))
        cache, window = self.cache, self.scores.windows[layer]
        pool = cache.keys[layer], cache.values[layer]
        scales = cache.key_scales[layer], cache.value_scales[layer]
        self.library.attend(self.step, queries, keys, values, *pool, window, out, *scales, self.scores.sinks_of(layer))
        return out
