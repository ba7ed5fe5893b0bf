"""Weights whose own form has no place here: into eight bits where that loses little, into floats where it would.

Checkpoints come in more forms than there are kernels: scales for every 16 or 32 inputs of eight-bit codes (GGUF's Q8_0
and Q6_K, GPTQ in 8 bits), or for blocks of rows and inputs (DeepSeek's FP8). They are unpacked a few rows at a time and
rounded again to int8 with one scale a row, and the loss of that is measured while it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from worker.models.forms import Form, Int8, Plain, joined
from worker.models.quantize import int8_of

MAX_ERROR = 0.02
"""Root mean square of what rounding to int8 may add, of the weights' own. On normally distributed weights Q6_K's own
steps amount to 0.017 (a 31st of the largest of 16 values, over the root of 12), and this adds 0.007 to 0.009."""
CPU = torch.device("cpu")
VALUES_AT_ONCE = 1 << 20
"""So many values are unpacked at a time."""

Rows = Callable[[int, int], Tensor]
"""The rows [start, stop) of a matrix [out, in], as float32."""
Fit = Callable[[tuple[int, int], Rows], Form]
"""From the shape and the rows of a matrix to a form for it, as ``fitted``."""
Eight = Callable[[str, Form, torch.dtype], Form]
"""From a matrix's name, and its form, as ``eight_of``."""


def spans(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """The rows of a matrix, a few at a time."""
    step = max(1, VALUES_AT_ONCE // shape[1])
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def dense_of(shape: tuple[int, int], rows: Rows, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """[out, in]"""
    weight = torch.empty(shape, dtype=dtype, device=device)
    for start, stop in spans(shape):
        weight[start:stop] = rows(start, stop)
    return weight


def fitted(shape: tuple[int, int], rows: Rows, dtype: torch.dtype, device: torch.device = CPU) -> Int8 | Plain:
    """In eight bits if the error is at most MAX_ERROR, else floats of ``dtype``. ``device``: where the rows are."""
    codes, scales = torch.empty(shape, dtype=torch.int8, device=device), torch.empty(shape[0], device=device)
    lost = whole = 0.0
    for start, stop in spans(shape):
        exact = rows(start, stop)
        near = int8_of(exact)
        codes[start:stop], scales[start:stop] = near.codes, near.scales
        whole += float(exact.square().sum())
        lost += float(exact.sub_(near.dense(torch.float32)).square_().sum())
    if lost <= MAX_ERROR**2 * whole:
        return Int8(codes, scales)
    return Plain(dense_of(shape, rows, dtype, device))  # also where a weight is no number


def together(parts: Mapping[str, Form], dtype: torch.dtype, eight: Eight) -> Form:
    """One matrix of the parts, by their names, below each other. Where their forms differ, as where a checkpoint has
    four bits for queries and six for values, all are brought to eight bits; where one is of floats, or eight bits are
    not enough, to floats.
    """
    forms = list(parts.values())
    alike = joined(forms)
    if alike is None and not any(isinstance(form, Plain) for form in forms):
        alike = joined([form if isinstance(form, Int8) else eight(name, form, dtype) for name, form in parts.items()])
    return alike or Plain(torch.cat([form.dense(dtype) for form in forms]))


def eight_of(form: Form, dtype: torch.dtype) -> Form:
    """As ``fitted``, of what is stored in another form, and where it is."""
    assert not isinstance(form, Plain)
    return fitted(form.shape, lambda *rows: form.rows(*rows).dense(torch.float32), dtype, form.codes.device)
