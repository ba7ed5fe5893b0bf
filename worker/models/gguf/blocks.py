"""Blocks of a GGUF's tensors: four-bit integers as they are into Int4, the others into values.

Layouts: ggml's ggml-common.h and ggml-quants.c. Everything here is cut by rows, so that no whole matrix is ever held in
float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.models.fitting import dense_of, fitted, spans
from worker.models.forms import Form, Int4, Plain
from worker.models.importers.mxfp4 import ONE
from worker.models.importers.mxfp4 import VALUES as NOT_NEGATIVE

_STEPS = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""Of IQ4_NL and IQ4_XS, closer together where weights are many."""
_E2M1 = torch.tensor([*NOT_NEGATIVE, *(-value for value in NOT_NEGATIVE)])
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def form_of(kind: str, raw: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Form:
    """``raw`` [out, bytes of a row] uint8 of one of KINDS."""
    if kind in FLOATS:
        return Plain(raw.view(FLOATS[kind]).to(dtype))
    if kind in SMALL_FLOATS:
        return Plain(dense_of(shape, lambda start, stop: values_of(kind, raw[start:stop]), dtype))
    if kind not in FOUR_BITS:
        return fitted(shape, lambda start, stop: values_of(kind, raw[start:stop]), dtype)
    codes = torch.empty((shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = torch.empty((shape[0], shape[1] // 32))
    offsets = torch.empty_like(scales)
    for start, stop in spans(shape):
        part = FOUR_BITS[kind](raw[start:stop])
        codes[start:stop], scales[start:stop], offsets[start:stop] = part.codes, part.scales, part.offsets
    return Int4(codes, scales, offsets, 32)


def values_of(kind: str, raw: Tensor) -> Tensor:
    """raw [rows, bytes of a row] uint8 -> [rows, in] f32"""
    if kind in FLOATS:
        return raw.view(FLOATS[kind]).float()
    if kind in FOUR_BITS:
        return FOUR_BITS[kind](raw).dense(torch.float32)
    return (SMALL_FLOATS if kind in SMALL_FLOATS else OTHERS)[kind](raw)


def _q4_0(raw: Tensor) -> Int4:
    blocks = _blocks(raw, 18)
    scales = _half(blocks[..., 0:2])
    return Int4(_halves(blocks[..., 2:]).flatten(1), scales, -8.0 * scales, 32)


def _q4_1(raw: Tensor) -> Int4:
    blocks = _blocks(raw, 20)
    return Int4(_halves(blocks[..., 4:]).flatten(1), _half(blocks[..., 0:2]), _half(blocks[..., 2:4]), 32)


def _q4_k(raw: Tensor) -> Int4:
    blocks = _blocks(raw, 144)
    scales, offsets = _k_scales(blocks)
    codes = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    both = torch.cat((_pairs(codes & 15), _pairs(codes >> 4)), 3)
    return Int4(both.flatten(1), scales.flatten(1), offsets.flatten(1), 32)


def _q5_0(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 22)
    return ((_fives(blocks[..., 2:6], blocks[..., 6:]) - 16.0) * _half(blocks[..., 0:2])[..., None]).flatten(1)


def _q5_1(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 24)
    scale, offset = _half(blocks[..., 0:2])[..., None], _half(blocks[..., 2:4])[..., None]
    return (_fives(blocks[..., 4:8], blocks[..., 8:]) * scale + offset).flatten(1)


def _q8_0(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 34)
    return (blocks[..., 2:].view(torch.int8).float() * _half(blocks[..., 0:2])[..., None]).flatten(1)


def _q5_k(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 176)
    scales, offsets = _k_scales(blocks)
    high, low = blocks[..., 16:48], blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    nibbles = torch.stack((low & 15, low >> 4), 3).flatten(2, 3)
    fifths = torch.stack([high >> bit & 1 for bit in range(8)], 2)
    return ((nibbles | fifths << 4).float() * scales[..., None] + offsets[..., None]).flatten(1)


def _q2_k(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 84)
    scale, least = _half(blocks[..., 80:82])[..., None], _half(blocks[..., 82:])[..., None]
    scales, offsets = (blocks[..., :16] & 15).float() * scale, (blocks[..., :16] >> 4).float() * least
    return (_sixteens(_twos(blocks[..., 16:80])) * scales[..., None] - offsets[..., None]).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 110)
    packed = blocks[..., 96:108]
    low = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), 2)
    high = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    scales = ((low | high << 4).to(torch.int8) - 32).float() * _half(blocks[..., 108:])[..., None]
    thirds = torch.stack([blocks[..., :32] >> bit & 1 for bit in range(8)], 2).reshape(*blocks.shape[:2], 2, 4, 32)
    codes = (_twos(blocks[..., 32:96]) | thirds << 2).to(torch.int8) - 4
    return (_sixteens(codes) * scales[..., None]).flatten(1)


def _q6_k(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    nibbles = torch.cat((low & 15, low >> 4), 3)
    pairs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    codes = (nibbles | pairs << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float() * _half(blocks[..., 208:])[..., None]
    return (_sixteens(codes) * scales[..., None]).flatten(1)


def _iq4_nl(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 18)
    return (_steps(blocks[..., 2:], _STEPS) * _half(blocks[..., 0:2])[..., None]).flatten(1)


def _iq4_xs(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 136)
    high = torch.stack([blocks[..., 2 + part // 4] >> 2 * (part % 4) & 3 for part in range(8)], 2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), 3).flatten(2)
    scales = ((low | high << 4).to(torch.int8) - 32).float() * _half(blocks[..., 0:2])[..., None]
    return (_steps(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16), _STEPS) * scales[..., None]).flatten(1)


def _mxfp4(raw: Tensor) -> Tensor:
    blocks = _blocks(raw, 17)
    return torch.ldexp(_steps(blocks[..., 1:], _E2M1), blocks[..., :1].int() - ONE).flatten(1)


FOUR_BITS: dict[str, Callable[[Tensor], Int4]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
SMALL_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {"MXFP4": _mxfp4}
"""Which floats of every type have too, for nothing but their size."""
KINDS = (*FLOATS, *FOUR_BITS, *OTHERS, *SMALL_FLOATS)


def _blocks(raw: Tensor, num_bytes: int) -> Tensor:
    """[rows, bytes of a row] -> [rows, blocks, bytes of a block]"""
    return raw.reshape(len(raw), -1, num_bytes)


def _half(pair: Tensor) -> Tensor:
    """Two bytes that are a float16: [..., 2] uint8 -> [...] f32"""
    return pair.contiguous().view(torch.float16).float().squeeze(-1)


def _pairs(codes: Tensor) -> Tensor:
    """Four-bit codes, two to a byte as Int4 has them: [..., n] -> [..., n / 2]"""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _halves(codes: Tensor) -> Tensor:
    """A block of 32: byte j holds value j in its low half and value 16 + j in its high one -> Int4's order."""
    return torch.cat((_pairs(codes & 15), _pairs(codes >> 4)), 2)


def _fives(high: Tensor, low: Tensor) -> Tensor:
    """Five-bit codes of a block of 32: bit j of ``high`` [..., 4] is the fifth of value j; ``low`` as in _halves."""
    bits = torch.stack([high >> bit & 1 for bit in range(8)], 3).flatten(2)
    return (torch.cat((low & 15, low >> 4), 2) | bits << 4).float()


def _twos(packed: Tensor) -> Tensor:
    """Two-bit codes of a block of 256: [rows, blocks, 64] -> [rows, blocks, 2, 4, 32], the lowest bits of 32 bytes
    first."""
    halves = packed.reshape(*packed.shape[:2], 2, 1, 32)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], 3)


def _sixteens(codes: Tensor) -> Tensor:
    """A block of 256 in the parts that have a scale each: [rows, blocks, …] -> [rows, blocks, 16, 16] f32"""
    return codes.reshape(*codes.shape[:2], 16, 16).float()


def _steps(packed: Tensor, steps: Tensor) -> Tensor:
    """What four-bit codes of uneven steps stand for, [..., 16] -> [..., 32] f32; in order as in _halves."""
    codes = torch.cat((packed & 15, packed >> 4), packed.dim() - 1)
    return steps.index_select(0, codes.int().flatten()).view(codes.shape)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the eight parts of a block, [rows, blocks, 8] f32, from six bits each in twelve bytes."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    scale, least = _half(blocks[..., 0:2])[..., None], _half(blocks[..., 2:4])[..., None]
    return scales.float() * scale, offsets.float() * -least
