"""What each row of a batch asks of the draw, as the compiled kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policies.terms import Sampling
from worker.sampling import race
from worker.transfer import sent


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
        # float32 would round some of them to 0, which is another wish.
        temperatures = [max(s.temperature, 1e-30) if s.temperature else 0.0 for s in asked]
        numbers = np.array((temperatures, [s.top_p for s in asked], [s.min_p for s in asked]), dtype=np.float32)
        top_ks = np.array([min(s.top_k, 2**31 - 1) for s in asked], dtype=np.int32)
        starts = race.streams(keys, torch.device("cpu")).numpy()
        packed = np.concatenate([part.ravel().view(np.uint8) for part in (starts, numbers, top_ks)])
        there = sent(packed, device)
        floats = there[8 * num : 20 * num].view(torch.float32).view(3, num)
        top = there[20 * num :].view(torch.int32)
        return cls(there[: 8 * num].view(torch.int64), floats[0], top, floats[1], floats[2])
