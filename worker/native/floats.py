"""Matrices for the compiled kernels that multiply floats, whatever the weights are stored in: see as_floats.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.native.packed import AnyMatrix, moved, pointer

FLOAT32, BFLOAT16, INT8, FLOAT8, INT4 = range(5)


class Matrix(ctypes.Structure):
    """as_floats.h's struct of the same name."""

    _fields_ = (
        ("form", c_int64),
        ("packed", c_void_p),
        ("groups", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("columns", c_int64),
        ("group", c_int64),
    )


class FloatMatrix:
    """A matrix [columns, size] in one of four forms, in panels of so many columns as a Library says."""

    FORM = 3
    """stored_matrix.h's number of it."""

    def __init__(
        self,
        form: int,
        packed: Tensor,
        shape: tuple[int, int],
        panel: int,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        groups: Tensor | None = None,
        group: int = 0,
    ) -> None:
        """``packed`` [columns, ...], what each column has one behind the other; scales and bias [columns]; groups
        [columns, size / group, 2] float32, of INT4."""
        self.columns, self.size = shape
        self._panel = panel
        self._packed = self._panels(packed)
        self._groups = None if groups is None else self._panels(groups)
        self._scales, self._bias = self._wide(scales), self._wide(bias)
        self.struct = Matrix(
            form,
            pointer(self._packed),
            pointer(self._groups),
            pointer(self._scales),
            pointer(self._bias),
            self.size,
            self.columns,
            group,
        )

    @property
    def any_matrix(self) -> AnyMatrix:
        return AnyMatrix(self.FORM, ctypes.addressof(self.struct), self.size, self.columns)

    @classmethod
    def of_floats(cls, weight: Tensor, panel: int, bias: Tensor | None = None) -> FloatMatrix:
        """weight [columns, size] bfloat16, float16 or float32: kept in bfloat16 where nothing is lost by that."""
        rounded = weight.to(torch.bfloat16)
        if weight.shape[1] % 2 == 0 and torch.equal(rounded.to(weight.dtype), weight):
            pairs = rounded.contiguous().view(torch.int32)
            return cls(BFLOAT16, pairs, (weight.shape[0], weight.shape[1]), panel, None, bias)
        return cls(FLOAT32, weight.float(), (weight.shape[0], weight.shape[1]), panel, None, bias)

    @classmethod
    def of_codes(cls, codes: Tensor, scales: Tensor, panel: int, bias: Tensor | None) -> FloatMatrix:
        """codes [columns, size] int8 or float8_e4m3fn, scales [columns]."""
        form = INT8 if codes.dtype is torch.int8 else FLOAT8
        return cls(form, codes.view(torch.int8), (codes.shape[0], codes.shape[1]), panel, scales, bias)

    @classmethod
    def of_int4(
        cls, codes: Tensor, scales: Tensor, offsets: Tensor, group: int, panel: int, bias: Tensor | None
    ) -> FloatMatrix:
        """As PackedInt4 takes them."""
        # The first of eight inputs is in the lowest bits already.
        eights = codes.contiguous().view(torch.int32)
        groups = torch.stack((scales, offsets), 2).float()
        return cls(INT4, eights, (codes.shape[0], 2 * codes.shape[1]), panel, None, bias, groups, group)

    def _panels(self, rows: Tensor) -> Tensor:
        """[columns, ...] -> [panels, ..., panel], filled up with zeros."""
        missing = -len(rows) % self._panel
        filled = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
        return moved(filled.view(-1, self._panel, *rows.shape[1:]).movedim(1, -1))

    def _wide(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else F.pad(values.float(), (0, -len(values) % self._panel))
