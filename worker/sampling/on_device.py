"""A batch's tokens drawn by the kernels of ``worker.triton.draws``: logits stay on the device, and nothing waits for
it. Importing this imports Triton.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
from torch import Tensor

from policies.terms import Sampling
from worker.device import is_out_of_memory
from worker.sampling import in_torch
from worker.sampling.tiles import WIDTH
from worker.sampling.wishes import Wishes
from worker.triton import draws as kernels

_TILES_EACH = 32

_TRIED = (
    Sampling(1, temperature=0.0),
    Sampling(1),
    Sampling(1, temperature=0.7, top_k=40),
    Sampling(1, top_p=0.9),
    Sampling(1, min_p=0.02),
    Sampling(1, temperature=1.2, top_k=200, top_p=0.8, min_p=0.01),
    Sampling(1),
)
"""What kernels are tried by; the last is of logits that are no distribution."""

log = logging.getLogger(__name__)


@cache
def agrees(device: torch.device, vocab_size: int) -> bool:
    """Whether the kernels draw what torch draws there, whatever is asked: tried before anybody's token is drawn. Raises
    what ``is_out_of_memory``."""
    generator = torch.Generator().manual_seed(8)
    logits = 4 * torch.randn(len(_TRIED), vocab_size, generator=generator).to(device)
    logits[-1, 0] = torch.nan
    keys = [(seed, 0) for seed in range(len(_TRIED))]
    try:
        drawn = draw(logits, Wishes.of(_TRIED, keys, device)).tolist()
    except Exception as error:
        if is_out_of_memory(error):
            raise  # to be tried again
        log.exception("Triton's kernels draw nothing here; torch draws instead")
        return False
    if drawn != in_torch.draw(logits, _TRIED, keys).tolist():
        log.error("Triton's kernels and torch draw other tokens; torch draws instead")
        return False
    return True


def draw(logits: Tensor, wishes: Wishes) -> Tensor:
    """logits [n, vocab_size] f32 -> token ids [n] i64, UNUSABLE where the logits are no distribution."""
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
