"""From floats to fewer bits, by rounding to the nearest code: no data is needed, and a row never depends on another."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.forms import INT4_GROUPS, Form, Fp8, Int4, Int8, Plain

_ROWS_AT_ONCE = 4096
"""A float32 copy is made of so many rows at a time."""


def int8_of(weight: Tensor) -> Int8:
    """weight [out, in] of any floating type. The largest magnitude of a row becomes 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE].float()
        scale = _not_zero(rows.abs().amax(1) / 127.0)
        scales[start : start + len(rows)] = scale
        codes[start : start + len(rows)] = (rows / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8(codes, scales)


def int4_of(weight: Tensor, group: int = 64) -> Int4:
    """weight [out, in] of any floating type, ``in`` a multiple of the group. A group's least and largest become 0 and
    15.
    """
    num_rows, num_inputs = weight.shape
    codes = torch.empty((num_rows, num_inputs // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((num_rows, num_inputs // group), dtype=torch.float32, device=weight.device)
    offsets = torch.empty_like(scales)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE].float().reshape(-1, num_inputs // group, group)
        least, largest = rows.aminmax(dim=2)
        scale = _not_zero((largest - least) / 15.0)
        code = ((rows - least[:, :, None]) / scale[:, :, None]).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
        here = slice(start, start + len(rows))
        codes[here] = code[:, 0::2] | (code[:, 1::2] << 4)
        scales[here], offsets[here] = scale, least
    return Int4(codes, scales, offsets, group)


def fp8_of(weight: Tensor) -> Fp8:
    """weight [out, in] of any floating type. The largest magnitude of a row becomes 448, e4m3's largest."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    most = torch.finfo(torch.float8_e4m3fn).max
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE].float()
        scale = _not_zero(rows.abs().amax(1) / most)
        scales[start : start + len(rows)] = scale
        codes[start : start + len(rows)] = (rows / scale[:, None]).clamp_(-most, most).to(torch.float8_e4m3fn)
    return Fp8(codes, scales)


def quantized(form: Form, kind: str) -> Form:
    """A plain matrix in "int8", "int4" or "fp8"; one that is quantised already stays as it is, and one whose rows no
    group divides becomes int8 where int4 is asked for.
    """
    if not isinstance(form, Plain):
        return form
    match kind:
        case "int8":
            return int8_of(form.weight)
        case "int4":
            group = next((group for group in (64, 32, 128) if form.shape[1] % group == 0), 0)
            assert group == 0 or group in INT4_GROUPS
            return int4_of(form.weight, group) if group else int8_of(form.weight)
        case "fp8":
            return fp8_of(form.weight)
    raise ValueError(f"there is no form {kind}")


def _not_zero(scale: Tensor) -> Tensor:
    """A row of zeros has any scale. One of something that is no number keeps it: codes cannot say it, and what looked
    like weights would be computed with."""
    return torch.where(scale == 0, 1.0, scale)
