"""Matrices of one-byte codes, a scale each row, on CUDA devices. Importing this imports Triton.

The codes are never widened in memory. With few tokens reading them is what takes time, and our kernel multiplies inputs
as they are. From ROUNDED_TOKENS on, multiplying is: inputs are rounded to int8 as well, each token by its largest
number, and torch multiplies integers, twice as fast as the tensor cores multiply bfloat16. That number is a guess: not
measured yet. In deterministic mode rows go in pieces of so many at least, all of them by the same way.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from worker.models.forms import Fp8, Int8
from worker.models.linear.base import Stored
from worker.models.linear.on_cuda import added_up, parts_of
from worker.triton import rows as rows_kernels
from worker.triton import scaled as kernels
from worker.triton.cut import Cut
from worker.triton.device import float8_as, multiplies

ROUNDED_TOKENS = 64
_BLOCK_BYTES = 256
"""Of inputs of one token at once."""
_LEAST_BLOCKS = 2
"""Of them that a program multiplies."""
_SUMS_AT_ONCE = 1 << 26
"""Of four bytes: a whole prompt's would be a gigabyte."""


class CudaScaledLinear:
    """A Linear for any type of activations."""

    __slots__ = ("_bias", "_codes", "_kind", "_rounds", "_scales", "in_features", "out_features")

    def __init__(self, form: Int8 | Fp8, bias: Tensor | None, rounds_inputs: bool) -> None:
        """``rounds_inputs``: where there are many, and the codes are int8."""
        self.out_features, self.in_features = form.shape
        # Slices of ranks are views; kernels read rows that follow each other.
        codes = form.codes.contiguous()
        self._kind, as_loaded = float8_as(codes)
        self._codes, self._scales, self._bias = codes.view(as_loaded), form.scales.contiguous(), bias
        aligned = self.in_features % 8 == self.out_features % 8 == 0
        self._rounds = rounds_inputs and isinstance(form, Int8) and aligned and _multiplies_int8(codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._multiply(x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._multiply(x, torch.float32)

    def stored(self) -> Stored:
        """As it lies."""
        return Stored(self._codes, self._kind, self._scales, self._bias)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_tokens, num_outputs = len(x), self.out_features
        y = x.new_empty((num_tokens, num_outputs), dtype=dtype)
        if not num_tokens:
            return y
        if self._rounds and num_tokens >= ROUNDED_TOKENS:
            return self._rounded(x, y)
        block_k = _BLOCK_BYTES // x.element_size()
        num_blocks = triton.cdiv(self.in_features, block_k)
        cut = Cut.of(num_tokens, num_outputs, num_blocks, _LEAST_BLOCKS, _BLOCK_BYTES, x.device)
        parts, bias, joins = parts_of(y, cut), x if self._bias is None else self._bias, cut.num_splits > 1
        kernels.multiply[cut.grid](
            self._codes, self._scales, x, bias, parts, num_tokens, num_outputs, self.in_features, x.stride(0),
            cut.steps_each, MULTIPLY=multiplies(x), FLOAT8=self._kind, HAS_BIAS=self._bias is not None and not joins,
            SPLIT=joins, BLOCK_N=cut.block_n, BLOCK_M=cut.block_m, BLOCK_K=block_k, num_stages=cut.num_stages,
            num_warps=cut.num_warps,
        )  # fmt: skip
        return added_up(parts, y, self._bias)

    def _rounded(self, x: Tensor, y: Tensor) -> Tensor:
        num_outputs, codes, scales = self.out_features, *to_int8(x)
        bias = x if self._bias is None else self._bias
        num_each = triton.cdiv(len(x), triton.cdiv(len(x) * num_outputs, _SUMS_AT_ONCE))
        # About equally many, since torch multiplies no fewer than 17 tokens as integers.
        for start in range(0, len(x), num_each):
            rows = slice(start, start + num_each)
            sums = torch._int_mm(codes[rows], self._codes.t())
            kernels.rescale[(len(sums), triton.cdiv(num_outputs, 1024))](
                sums, scales[rows], self._scales, bias, y[rows], num_outputs, HAS_BIAS=self._bias is not None,
                BLOCK=1024,
            )  # fmt: skip
        return y


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, size] as int8 codes [n, size] times scales [n] f32, each row by its own largest number."""
    codes, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((len(x),), dtype=torch.float32)
    if len(x):
        block = min(4096, triton.next_power_of_2(x.shape[1]))
        rows_kernels.to_codes[(len(x),)](x, codes, scales, x.shape[1], x.stride(0), FLOAT8=0, BLOCK=block)
    return codes, scales


@cache
def _multiplies_int8(device: torch.device) -> bool:
    """Tried out: which devices and versions of torch do is written nowhere."""
    codes = torch.zeros((32, 32), dtype=torch.int8, device=device)
    try:
        torch._int_mm(codes, codes.t())
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True
