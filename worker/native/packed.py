"""Matrices of few bits, put into the order in which the compiled kernels read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """For ``Library.linear_int8``."""

    codes: Tensor
    """[columns / 16, size / 64, 16, 16, 4] uint8, each 128 more than the code; columns filled up to a multiple of 32,
    the size to one of 64. Rows of a tile are four inputs, columns outputs."""
    scales: Tensor
    """[columns, filled up likewise] float32"""
    columns: int
    size: int


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """For ``Library.linear_int4``."""

    groups: Tensor
    """[columns / 16, size / group, 64 + 8 * group] uint8, columns filled up: 16 scales and 16 offsets in float16, then
    the codes, for each 8 inputs a line of 16 columns of 4 bytes, the first four inputs in their low halves."""
    unit: float
    """That all scales and offsets are to be multiplied by, a power of two: float16 has too few exponents for some."""
    columns: int
    size: int
    group: int


def packed_int8(codes: Tensor, scales: Tensor) -> PackedInt8:
    """codes [columns, size] int8, scales [columns] float32"""
    columns, size = codes.shape
    # Flipping the sign bit adds 128.
    filled = F.pad(codes.view(torch.uint8) ^ 128, (0, -size % 64, 0, -columns % 32), value=128)
    tiles = filled.view(-1, 16, filled.shape[1] // 64, 16, 4).permute(0, 2, 3, 1, 4).contiguous()
    return PackedInt8(tiles, filled_up(scales.float()), columns, size)


def filled_up(values: Tensor) -> Tensor:
    """values [columns], with zeros up to a multiple of 32"""
    return F.pad(values, (0, -len(values) % 32))


def packed_int4(codes: Tensor, scales: Tensor, offsets: Tensor, group: int) -> PackedInt4:
    """codes [columns, size / 2] uint8, the even inputs in the low halves; scales and offsets [columns, size / group],
    finite. ``group`` is a multiple of 32.
    """
    columns, size = len(codes), 2 * codes.shape[1]
    codes, scales, offsets = (F.pad(part, (0, 0, 0, -columns % 16)) for part in (codes, scales, offsets))
    largest = max(float(scales.abs().max()), float(offsets.abs().max()))
    unit = math.ldexp(1.0, math.frexp(largest)[1] - 15)
    terms = torch.stack((scales, offsets), 2).float().div_(unit).half().view(len(codes) // 16, 16, -1, 2)
    stored = codes.view(len(codes) // 16, 16, size // group, group // 8, 4)
    # Of 8 inputs: 0, 1, .. 3 and 4, 5, .. 7 share bytes here, where 0 and 1, 2 and 3, .. do as they are stored.
    inputs = torch.stack((stored & 15, stored >> 4), 5).flatten(4)
    lines = inputs[..., :4] | inputs[..., 4:] << 4
    return PackedInt4(
        torch.cat(
            (
                terms.permute(0, 2, 3, 1).reshape(len(codes) // 16, size // group, 32).view(torch.uint8),
                lines.permute(0, 2, 3, 1, 4).flatten(2),
            ),
            2,
        ).contiguous(),
        unit,
        columns,
        size,
        group,
    )
