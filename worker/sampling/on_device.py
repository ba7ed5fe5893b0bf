"""A batch's tokens drawn by the kernels of ``worker.triton.draws``: logits stay on the device, and nothing waits for
it. Importing this imports Triton.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from worker.sampling.tiles import WIDTH
from worker.sampling.wishes import Wishes
from worker.triton import draws as kernels

_TILES_EACH = 32


def draw(logits: Tensor, wishes: Wishes) -> Tensor:
    """logits [n, vocab_size] f32 -> token ids [n] i64, -1 where the logits are no distribution."""
    num, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, WIDTH)
    maxima, masses = logits.new_empty((2, num, num_tiles))
    notes = logits.new_empty((num, num_tiles), dtype=torch.int32)
    chosen = logits.new_empty((num,), dtype=torch.int64)
    if num:
        kernels.survey[(num, triton.cdiv(num_tiles, _TILES_EACH))](
            logits, wishes.temperatures, maxima, masses, vocab_size, num_tiles, logits.stride(0), TILES=_TILES_EACH
        )
        kernels.draw[(num,)](
            logits, maxima, masses, wishes.starts, wishes.temperatures, wishes.top_ks, wishes.top_ps, wishes.min_ps,
            notes, chosen, vocab_size, num_tiles, logits.stride(0),
            BLOCK_T=max(64, triton.next_power_of_2(num_tiles)), num_warps=8,
        )  # fmt: skip
    return chosen


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """logits [n, vocab_size] f32, in place: see ``worker.sampling.masks``. rows [m] i64, bits [m, words] i32."""
    num, num_words = bits.shape
    if num:
        kernels.mask[(num, triton.cdiv(num_words, _TILES_EACH))](
            logits, rows, bits, logits.shape[1], num_words, logits.stride(0), WORDS=_TILES_EACH
        )
