"""What each row of a batch asks of the draw: as the kernels of the CPU read it, row by row, and as Triton reads it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policies.terms import Sampling
from worker.sampling import race
from worker.transfer import sent

UNUSABLE = -1
"""Drawn instead of a token where the logits are no distribution (NaN, +inf, or nothing above -inf)."""

_WISH = struct.Struct("=fffi")
NO_NOISE = bytes(8)
"""In place of a start where nothing is left to chance."""


def wish_of(sampling: Sampling) -> bytes:
    """A row's wish, as draws.h declares it, but for the start of its noise, which comes before it."""
    return _WISH.pack(_temperature(sampling), sampling.top_p, sampling.min_p, _top_k(sampling))


def _temperature(sampling: Sampling) -> float:
    """float32 would round some of them to 0, which is another wish."""
    return max(sampling.temperature, 1e-30) if sampling.temperature else 0.0


def _top_k(sampling: Sampling) -> int:
    return min(sampling.top_k, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of each row, on the device."""

    starts: Tensor
    """[n] i64, see race.streams"""
    temperatures: Tensor
    """[n] f32; 0: the likeliest token"""
    top_ks: Tensor
    """[n] i32; 0: all"""
    top_ps: Tensor
    """[n] f32; 1: all"""
    min_ps: Tensor
    """[n] f32; 0: all"""

    @classmethod
    def of(cls, asked: Sequence[Sampling], keys: Sequence[tuple[int, int]], device: torch.device) -> Wishes:
        """keys: (seed, position) of each row. One upload."""
        num = len(asked)
        numbers = np.array(
            ([_temperature(s) for s in asked], [s.top_p for s in asked], [s.min_p for s in asked]), dtype=np.float32
        )
        top_ks = np.array([_top_k(s) for s in asked], dtype=np.int32)
        starts = race.streams(keys, torch.device("cpu")).numpy()
        packed = np.concatenate([part.ravel().view(np.uint8) for part in (starts, numbers, top_ks)])
        there = sent(packed, device)
        floats = there[8 * num : 20 * num].view(torch.float32).view(3, num)
        top = there[20 * num :].view(torch.int32)
        return cls(there[: 8 * num].view(torch.int64), floats[0], top, floats[1], floats[2])
