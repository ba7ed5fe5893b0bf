"""Matrices of four-bit and float8 codes on CUDA devices. Importing this imports Triton.

The number of tokens decides how four-bit codes are multiplied: by our kernel, which reads a quarter of the bytes, or,
from DENSE_TOKENS on, by torch, from weights unpacked for the moment. That number is a guess: not measured yet.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from worker.models.forms import Fp8, Int4
from worker.models.linear.base import Stored
from worker.triton import int4 as int4_kernels
from worker.triton import rows as rows_kernels
from worker.triton.cut import Cut
from worker.triton.device import float8_as, multiplies
from worker.triton.float8 import FLOAT8_BYTES

DENSE_TOKENS = 256
_OUTPUTS_AT_ONCE = 16384
"""That are unpacked at a time: all of an output head would be a gigabyte."""
_LEAST_GROUPS = 2
"""That a program multiplies."""


def parts_of(y: Tensor, cut: Cut) -> Tensor:
    """What programs write to: y, or where several share a tile [num_splits, num_tokens, num_outputs] f32."""
    return y if cut.num_splits == 1 else y.new_empty((cut.num_splits, *y.shape), dtype=torch.float32)


def added_up(parts: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """y, from parts and bias where it was not written at once."""
    if parts is not y:
        int4_kernels.add_up[(triton.cdiv(y.numel(), 1024),)](
            parts, parts if bias is None else bias, y, y.numel(), y.shape[1], len(parts), HAS_BIAS=bias is not None,
            BLOCK=1024,
        )  # fmt: skip
    return y


class CudaInt4Linear:
    """A Linear by our kernels, for any type of activations."""

    __slots__ = ("_bias", "_form", "in_features", "out_features")

    def __init__(self, form: Int4, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        # Slices of ranks are views; kernels read rows that follow each other.
        self._form = Int4(
            form.codes.contiguous(), form.scales.contiguous(), form.offsets.contiguous(), form.group, form.order
        )
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._multiply(x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        form = self._form
        x = x if form.order is None else x[:, form.order]
        if len(x) >= DENSE_TOKENS:
            return self._densely(x).to(dtype)
        num_tokens, num_outputs = len(x), self.out_features
        y = x.new_empty((num_tokens, num_outputs), dtype=dtype)
        if not num_tokens:
            return y
        num_groups, group_bytes = self.in_features // form.group, form.group * x.element_size()
        cut = Cut.of(num_tokens, num_outputs, num_groups, _LEAST_GROUPS, group_bytes, x.device)
        parts, bias, joins = parts_of(y, cut), x if self._bias is None else self._bias, cut.num_splits > 1
        int4_kernels.multiply[cut.grid](
            form.codes, form.scales, form.offsets, x, bias, parts, num_tokens, num_outputs, self.in_features,
            x.stride(0), cut.steps_each, GROUP=form.group, MULTIPLY=multiplies(x),
            HAS_BIAS=self._bias is not None and not joins, SPLIT=joins, BLOCK_N=cut.block_n, BLOCK_M=cut.block_m,
            num_stages=cut.num_stages, num_warps=cut.num_warps,
        )  # fmt: skip
        return added_up(parts, y, self._bias)

    def _densely(self, x: Tensor) -> Tensor:
        form, num_outputs = self._form, self.out_features
        y = x.new_empty((len(x), num_outputs))
        weights = x.new_empty((min(num_outputs, _OUTPUTS_AT_ONCE), self.in_features))
        for start in range(0, num_outputs, _OUTPUTS_AT_ONCE):
            part = slice(start, min(start + _OUTPUTS_AT_ONCE, num_outputs))
            num = part.stop - start
            int4_kernels.unpack[(triton.cdiv(num, 32), self.in_features // form.group)](
                form.codes[part], form.scales[part], form.offsets[part], weights, num, self.in_features,
                GROUP=form.group, BLOCK_N=32,
            )  # fmt: skip
            y[:, part] = F.linear(x, weights[:num], None if self._bias is None else self._bias[part])
        return y


class CudaFp8Linear:
    """A Linear by torch's scaled matrix product, which makes bfloat16: each token is rounded to float8 by its largest
    number.
    """

    __slots__ = ("_bias", "_codes", "_scales", "in_features", "out_features")

    def __init__(self, form: Fp8, bias: Tensor | None) -> None:
        self.out_features, self.in_features = form.shape
        self._codes, self._scales = form.codes.contiguous().t(), form.scales[None, :].contiguous()
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    @staticmethod
    def serves(form: Fp8) -> bool:
        """Whether torch multiplies this matrix so, on the device where it is."""
        aligned = form.shape[0] % 16 == form.shape[1] % 16 == 0
        return aligned and _multiplies_float8(form.codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        codes, scales = to_float8(x)
        y = torch._scaled_mm(
            codes, self._codes, scale_a=scales, scale_b=self._scales, bias=self._bias, out_dtype=torch.bfloat16
        )
        return y.to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self(x).float()

    def stored(self) -> Stored:
        """As it lies."""
        codes = self._codes.t()
        kind, as_loaded = float8_as(codes)
        return Stored(codes.view(as_loaded), kind, self._scales[0], self._bias)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, size] as e4m3 codes [n, size] times scales [n, 1] f32, each row by its own largest number."""
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    scales = x.new_empty((len(x), 1), dtype=torch.float32)
    if len(x):
        block = min(4096, triton.next_power_of_2(x.shape[1]))
        rows_kernels.to_codes[(len(x),)](x, codes, scales, x.shape[1], x.stride(0), FLOAT8=FLOAT8_BYTES, BLOCK=block)
    return codes.view(torch.float8_e4m3fn), scales


@cache
def _multiplies_float8(device: torch.device) -> bool:
    """Tried out: which devices and versions of torch take a scale for each row is written nowhere."""
    codes = torch.zeros((16, 16), device=device).to(torch.float8_e4m3fn)
    ones = torch.ones((16, 1), device=device)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True
