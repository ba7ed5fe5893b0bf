"""Matrices, put into the order in which the compiled kernels read them; whoever has one keeps what it points to."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_int64, c_void_p
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.native.pages import huge_empty

TILE = 16
"""Columns of a matrix that lie together; two times as many are a panel."""
PANEL = 2 * TILE
DEEP = 64
"""Inputs of a tile of int8."""


class Matrix(ctypes.Structure):
    """linear.h's struct of the same name."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("columns", c_int64),
        ("apart", c_int64),
        ("panels", c_void_p),
        ("exceptions", c_void_p),
        ("firsts", c_void_p),
    )


class Int8Matrix(ctypes.Structure):
    """int8.h's."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("columns", c_int64),
        ("apart", c_int64),
    )


class Int4Matrix(ctypes.Structure):
    """int4.h's."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("unit", c_double),
        ("size", c_int64),
        ("columns", c_int64),
        ("apart", c_int64),
        ("group", c_int64),
        ("may_widen", c_int64),
    )


class AnyMatrix(ctypes.Structure):
    """stored_matrix.h's."""

    _fields_ = (
        ("form", c_int64),
        ("matrix", c_void_p),
        ("size", c_int64),
        ("columns", c_int64),
    )


class _Packed:
    """What packed matrices have in common.

    ``gated``: the lower half of the rows opens the upper half, and, their size being a multiple of 16, a panel has one
    tile of each, so that the kernels can say at once what comes through; elsewhere the tiles of a panel are neighbours.
    """

    FORM: int
    """stored_matrix.h's number of it."""
    struct: ctypes.Structure

    def __init__(self, columns: int, size: int, gated: bool) -> None:
        self.columns, self.size = columns, size
        self.gated = gated and columns % PANEL == 0

    @property
    def any_matrix(self) -> AnyMatrix:
        return AnyMatrix(self.FORM, ctypes.addressof(self.struct), self.size, self.columns)

    @property
    def _apart(self) -> int:
        return self.columns // 2 if self.gated else TILE

    def _panels(self, rows: Tensor) -> Tensor:
        """rows [columns, ...] -> [columns / 32, 2, 16, ...], filled up with zeros to whole panels."""
        if self.gated:
            return rows.view(2, -1, TILE, *rows.shape[1:]).transpose(0, 1)
        missing = -len(rows) % PANEL
        filled = torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows
        return filled.reshape(-1, 2, TILE, *rows.shape[1:])

    def _wide(self, values: Tensor | None) -> Tensor | None:
        """[columns] -> [columns / 32, 2, 16] float32"""
        return None if values is None else self._panels(values.float()).contiguous()


class Coder(Protocol):
    """See Library.code."""

    def __call__(self, weight: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor, Tensor] | None: ...


class PackedMatrix(_Packed):
    """A bfloat16 matrix [columns, size], in the tiles of AMX, which vectors read as well: rows of a tile are pairs of
    inputs, columns outputs. With a ``code`` it is in twelve bits a weight, and nothing is lost (see coded.h), unless
    its exponents are too many.
    """

    FORM = 0

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool, code: Coder | None = None) -> None:
        """``size`` must be a multiple of 32."""
        super().__init__(weight.shape[0], weight.shape[1], gated)
        self._bias = bias
        self.struct = Matrix(None, pointer(bias), self.size, self.columns, self._apart)
        self.coded = None if code is None else code(weight.contiguous(), self.struct)
        """Panels, exceptions and where those of each panel begin; None: its exponents are too many, or may be."""
        if self.coded is not None:
            self.struct.panels, self.struct.exceptions, self.struct.firsts = map(pointer, self.coded)
            return
        panels = self._panels(weight)
        self._tiles = moved(panels.view(*panels.shape[:3], -1, 16, 2).permute(0, 3, 1, 4, 2, 5))
        self.struct.packed = pointer(self._tiles)

    @property
    def is_coded(self) -> bool:
        return self.coded is not None


class PackedInt8(_Packed):
    """Codes [columns, size] int8, each to be multiplied by its row's scale.

    Tiles are of 16 columns by 64 inputs, rows of a tile four inputs, columns outputs; codes are 128 more, inputs filled
    up.
    """

    FORM = 1

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, gated: bool = False) -> None:
        """scales [columns] float32"""
        super().__init__(codes.shape[0], codes.shape[1], gated)
        # Flipping the sign bit adds 128.
        filled = F.pad(codes.view(torch.uint8) ^ 128, (0, -self.size % DEEP), value=128)
        panels = self._panels(filled)
        tiles = panels.view(*panels.shape[:3], -1, 16, 4).permute(0, 3, 1, 4, 2, 5)
        self._tiles, self._scales, self._bias = moved(tiles), self._wide(scales), self._wide(bias)
        self.struct = Int8Matrix(
            pointer(self._tiles),
            pointer(self._scales),
            pointer(self._bias),
            self.size,
            self.columns,
            self._apart,
        )


class PackedInt4(_Packed):
    """Four-bit codes with a scale and an offset for each group of inputs.

    A panel is for each group, and then for each of its tiles, 16 scales and 16 offsets in float16, and the codes: for
    each 8 inputs a line of 16 columns of 4 bytes, the first four inputs in their low halves.
    """

    FORM = 2

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor,
        group: int,
        bias: Tensor | None,
        gated: bool = False,
        may_widen: bool = False,
    ) -> None:
        """codes [columns, size / 2] uint8, the even inputs in the low halves; scales and offsets
        [columns, size / group], finite. ``group`` is a multiple of 32. ``may_widen``: many rows may be multiplied in
        another way than few, see widened.h.
        """
        super().__init__(len(codes), 2 * codes.shape[1], gated)
        # Float16 has too few exponents for some: all are stored as multiples of a power of two.
        largest = max(float(scales.abs().max()), float(offsets.abs().max()))
        unit = math.ldexp(1.0, math.frexp(largest)[1] - 15)
        terms = torch.stack((scales, offsets), 2).float().div_(unit).half()
        stored = codes.view(self.columns, self.size // group, group // 8, 4)
        # Of 8 inputs: 0, 1, .. 3 and 4, 5, .. 7 share bytes here, where 0 and 1, 2 and 3, .. do as they are stored.
        inputs = torch.stack((stored & 15, stored >> 4), 4).flatten(3)
        lines = self._panels(inputs[..., :4] | inputs[..., 4:] << 4).permute(0, 3, 1, 4, 2, 5)
        units = self._panels(terms).permute(0, 3, 1, 4, 2).contiguous().view(torch.uint8)
        self._groups = moved(torch.cat((units.flatten(3), lines.flatten(3)), 3))
        self._bias = self._wide(bias)
        self.struct = Int4Matrix(
            pointer(self._groups),
            pointer(self._bias),
            unit,
            self.size,
            self.columns,
            self._apart,
            group,
            may_widen,
        )


def moved(tensor: Tensor) -> Tensor:
    return huge_empty(tensor.shape, tensor.dtype).copy_(tensor)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
