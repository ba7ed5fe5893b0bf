"""Codes of few bits out of wider words, and from scales and zero points to our forms: what the methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.models.errors import ModelError
from worker.models.fitting import Fit, Rows, spans
from worker.models.forms import INT4_GROUPS, Form, Fp8, Int4, Int8

_NO_NUMBER = 0x7F
"""Of float8_e4m3fn, apart from its sign."""
Codes = Callable[[slice], Tensor]
"""Some rows of a matrix of codes, one to a byte."""


def matches(name: str, entries: Sequence[str]) -> bool:
    """Whether one of a list's entries names this module, one around it, or the end of its name."""
    return any(f".{entry.strip('.')}." in f".{name}." for entry in entries if entry)


def nibbles(words: Tensor) -> Tensor:
    """words [rows, n] int32 -> [rows, 8 n] uint8, the lowest bits of a word first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def paired(codes: Tensor) -> Tensor:
    """Four-bit codes [rows, n] uint8 -> [rows, n / 2], as Int4 has them."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def four_bits(codes: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor | None, name: str, fit: Fit) -> Form:
    """w = (code - zero) * scale: codes [out, in / 2] uint8 as Int4 has them, scales and zeros [out, groups] f32;
    ``g_idx`` [in]: the group of each input, None: in order. Raises ModelError.
    """
    num_inputs, num_groups = 2 * codes.shape[1], scales.shape[1]
    order = None
    if g_idx is not None:
        order, is_even = order_of(g_idx, num_inputs, num_groups, name)
        if not is_even:
            group_of = g_idx.long()
            return fit((len(codes), num_inputs), _rows(_unpaired(codes), scales, zeros, group_of))
        if order is not None:
            codes = _reordered(codes, order)
    offsets = -zeros * scales
    group = num_inputs // num_groups
    own = next((size for size in reversed(INT4_GROUPS) if group % size == 0), 0)
    if own:
        times = group // own
        return Int4(codes, scales.repeat_interleave(times, 1), offsets.repeat_interleave(times, 1), own, order)
    narrow = Int4(codes, scales, offsets, group, order)
    return fit(narrow.shape, lambda start, stop: narrow.rows(start, stop).dense(torch.float32))


def eight_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, name: str, fit: Fit) -> Form:
    """The same of codes [out, in] int8 or uint8; ``zeros`` None: all are 0."""
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    if num_groups == 1 and zeros is None and codes.dtype == torch.int8:
        return Int8(codes, scales[:, 0].contiguous())
    if g_idx is None:
        group_of = torch.arange(num_inputs) // (num_inputs // num_groups)
    else:
        order_of(g_idx, num_inputs, num_groups, name)
        group_of = g_idx.long()
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    return fit((len(codes), num_inputs), _rows(lambda rows: codes[rows], scales, zeros, group_of))


def float_8(codes: Tensor, scales: Tensor, block: tuple[int, int] | None, name: str, fit: Fit) -> Form:
    """codes [out, in] float8_e4m3fn, scales [out, 1], or one for each block of rows and inputs. Raises ModelError."""
    if block is None:
        sizes, shape = codes.view(torch.uint8), (codes.shape[0], codes.shape[1])
        # Kernels that make floats of codes by their bits see a large number there.
        if any(int((sizes[start:stop] & _NO_NUMBER).max()) == _NO_NUMBER for start, stop in spans(shape)):
            raise ModelError(f"tensor {name}.weight holds values that are no numbers")
        return Fp8(codes, scales[:, 0].contiguous())
    height, width = (min(size, there) for size, there in zip(block, codes.shape, strict=True))

    def rows(start: int, stop: int) -> Tensor:
        here = scales[start // height : -(-stop // height)].repeat_interleave(height, 0)
        wide = here.repeat_interleave(width, 1)[start % height :, : codes.shape[1]]
        return codes[start:stop].float() * wide[: stop - start]

    return fit((codes.shape[0], codes.shape[1]), rows)


def order_of(g_idx: Tensor, num_inputs: int, num_groups: int, name: str) -> tuple[Tensor | None, bool]:
    """The inputs by group (None: they are so already), and whether all groups are of one size. Raises ModelError."""
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= num_groups:
        raise ModelError(f"{name} places an input in a group past the {num_groups} that it has")
    group_of = g_idx.long()
    even = torch.arange(num_inputs) // (num_inputs // num_groups)
    if torch.equal(group_of, even):
        return None, True
    order = torch.argsort(group_of, stable=True)
    return order, torch.equal(group_of[order], even)


def _rows(codes: Codes, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Rows:
    def rows(start: int, stop: int) -> Tensor:
        here = slice(start, stop)
        return (codes(here).float() - zeros[here][:, group_of]) * scales[here][:, group_of]

    return rows


def _unpaired(codes: Tensor) -> Codes:
    return lambda rows: torch.stack((codes[rows] & 15, codes[rows] >> 4), 2).flatten(1)


def _reordered(codes: Tensor, order: Tensor) -> Tensor:
    """The columns in another order, a few rows at a time."""
    moved, unpaired = torch.empty_like(codes), _unpaired(codes)
    for start, stop in spans((len(codes), len(order))):
        moved[start:stop] = paired(unpaired(slice(start, stop))[:, order])
    return moved
