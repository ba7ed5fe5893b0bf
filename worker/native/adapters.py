"""Adapters in the order in which the compiled kernels read them: see owners.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.native.pages import HUGE_PAGE_BYTES, own_pages

MAX_FACTORS = 3
TILE = 16
LINE = 2 * TILE
"""Elements: sixteen columns of a pair of inputs."""
AHEAD = 32 * LINE
"""Elements after the last line that may be read, whatever they hold."""


class Factor(ctypes.Structure):
    """One product's down [rank, in] and up [width, rank] in lines, as owners.h declares it, and its first column."""

    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int64), ("left", c_int64), ("width", c_int64))


class PackedAdapter:
    """All factors of one adapter, in one stretch of memory."""

    def __init__(self, factors: Mapping[int, Sequence[tuple[Tensor, Tensor, int]]], num_products: int) -> None:
        """By product, at most MAX_FACTORS each: down [rank, in], up [width, rank], both bfloat16, and the first
        column."""
        lines: list[Tensor] = []
        self.rank = max(len(down) for parts in factors.values() for down, _, _ in parts)
        """The largest."""
        table = (Factor * (num_products * MAX_FACTORS))()
        for product, parts in factors.items():
            assert len(parts) <= MAX_FACTORS
            # The narrow sides of a product are asked for together.
            lines += (in_lines(down) for down, _, _ in parts)
            lines += (in_lines(up) for _, up, _ in parts)
            for place, (down, up, left) in enumerate(parts):
                table[product * MAX_FACTORS + place] = Factor(rank=len(down), left=left, width=len(up))
        self.num_bytes = 2 * sum(part.numel() for part in lines)
        self._table = table
        # Not among what others have: it goes when the adapter goes, and it is written beside a step.
        num_mapped = -(-(self.num_bytes + 2 * AHEAD) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._memory = own_pages(num_mapped)[:num_mapped].view(torch.bfloat16)
        at = 0
        places = iter(lines)
        for first in range(0, len(table), MAX_FACTORS):
            for name in ("down", "up"):
                for factor in table[first : first + MAX_FACTORS]:
                    if factor.width:
                        part = next(places).flatten()
                        self._memory[at : at + len(part)] = part
                        setattr(factor, name, self._memory.data_ptr() + 2 * at)
                        at += len(part)
        self.address = ctypes.addressof(table)


def in_lines(matrix: Tensor) -> Tensor:
    """matrix [columns, size] -> [columns / 16, size / 2, 16, 2], filled up with zeros"""
    columns, size = matrix.shape
    filled = F.pad(matrix, (0, -size % 2, 0, -columns % TILE))
    return filled.view(-1, TILE, filled.shape[1] // 2, 2).permute(0, 2, 1, 3)
