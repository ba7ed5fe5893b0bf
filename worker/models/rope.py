"""The angles of rotary position embeddings, for every stretching that published checkpoints use.

Formulas follow transformers' modeling_rope_utils.py, so that logits match it: linear (kaiokendev 2023), dynamic NTK
(bloc97 and emozilla 2023), YaRN (Peng et al. 2023, section 3), LongRoPE (Ding et al. 2024), Llama 3.1's ramp, and
Gemma's proportional form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.models.architecture import Rope
from worker.models.errors import ModelError
from worker.models.fields import Fields

MAX_ROTARY_DIM = 1 << 14
MAX_REACH = 1 << 31
PAGE = 64
"""Positions of a table that are filled in at once."""
MAX_TABLE_BYTES = 256 << 20
"""Of all positions, on a device: one launch looks them up, where nine would compute them."""


class Rotary:
    """cos and sin of positions.

    A position's angles never depend on who else is in the batch or on how a prompt was cut. Two kinds make them depend
    on the length of the sequence, which no paged cache can follow exactly: for the dynamic kind, position p turns as in
    a sequence of p + 1 tokens (what token-by-token generation does); LongRoPE uses its long factors for all positions
    as soon as ``max_model_tokens`` exceeds the context of pretraining, and its short ones otherwise.
    """

    def __init__(self, rope: Rope, max_model_tokens: int, device: torch.device) -> None:
        self._rope = rope
        self._max_model_tokens = max_model_tokens
        self._frequencies = inverse_frequencies(rope, max_model_tokens).to(device)
        self._stretches = rope.kind == "dynamic" and max_model_tokens > rope.max_positions
        self._table: Tensor | None = None
        """[positions, 2 * rotary_dim] f32: what ``at`` says of each."""
        if device.type == "cuda":
            self.look_up()

    def look_up(self) -> None:
        """From now on, where a table of all positions is not too large."""
        # Behind the last position that a model takes may be one that is computed in vain.
        num_positions = self._max_model_tokens + PAGE
        if num_positions * 2 * self._rope.rotary_dim * 4 <= MAX_TABLE_BYTES:
            positions = torch.arange(num_positions, device=self._frequencies.device)
            self._table = torch.cat(self._computed(positions), 1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [num_tokens] i64 -> cos and sin, each [num_tokens, rotary_dim] f32, the first half of sin negated.

        With x rolled by half of rotary_dim, ``x * cos + rolled * sin`` is the rotation.
        """
        if self._table is None:
            return self._computed(positions)
        rows, rotary_dim = self._table.index_select(0, positions), self._rope.rotary_dim
        return rows[:, :rotary_dim], rows[:, rotary_dim:]

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = _dynamic(self._rope, positions) if self._stretches else self._frequencies
        angles = positions.float()[:, None] * frequencies
        cos, sin = (angles.cos(), angles.sin()) if angles.is_cuda else _cos_and_sin(angles)
        if self._rope.attention_factor != 1.0:
            cos, sin = cos * self._rope.attention_factor, sin * self._rope.attention_factor
        return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)

    def angles(self) -> Angles:
        """Of all positions."""
        return Angles(self, -(-self._max_model_tokens // PAGE), self._rope.rotary_dim)


class Angles:
    """Tables on the host of what Rotary says, as far as it has been asked for: to be told all positions at the start
    would take time, and what nobody has written to is no memory yet.
    """

    def __init__(self, rotary: Rotary, num_pages: int, rotary_dim: int) -> None:
        self._rotary = rotary
        self._is_known = bytearray(num_pages)
        self.cos, self.sin = (torch.empty((num_pages * PAGE, rotary_dim)) for _ in range(2))
        """[positions, rotary_dim] f32"""

    def learn(self, positions: Iterable[int]) -> None:
        """From now on the tables have these."""
        is_known = self._is_known
        for position in positions:
            if not is_known[position // PAGE]:
                self._fill(position // PAGE)

    def _fill(self, page: int) -> None:
        rows = slice(page * PAGE, (page + 1) * PAGE)
        self.cos[rows], self.sin[rows] = self._rotary.at(torch.arange(rows.start, rows.stop))
        self._is_known[page] = True


def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """By numpy: from four tokens on torch wakes its threads for them, which takes longer than the functions do."""
    on_host = angles.numpy()
    return torch.from_numpy(np.cos(on_host)), torch.from_numpy(np.sin(on_host))


def inverse_frequencies(rope: Rope, max_model_tokens: int) -> Tensor:
    """Radians a position, [rotary_dim / 2] f32."""
    match rope.kind:
        case "default" | "dynamic":
            return _plain(rope)
        case "linear":
            return _plain(rope) / rope.factor
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope)
        case "longrope":
            long = max_model_tokens > rope.original_max_positions
            factors = torch.tensor(rope.long_factors if long else rope.short_factors, dtype=torch.float32)
            return 1.0 / (factors * rope.theta ** _exponents(rope.rotary_dim))
        case "proportional":
            num_turning = int(rope.partial_factor * rope.rotary_dim // 2)
            frequencies = _plain(rope) / rope.factor
            frequencies[num_turning:] = 0.0
            return frequencies


def _exponents(dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _plain(rope: Rope) -> Tensor:
    return 1.0 / (rope.theta ** _exponents(rope.rotary_dim))


def _dynamic(rope: Rope, positions: Tensor) -> Tensor:
    """[positions, rotary_dim / 2]"""
    dim = rope.rotary_dim
    lengths = (positions + 1).clamp(min=rope.max_positions).double()
    stretch = rope.factor * lengths / rope.max_positions - (rope.factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    # Made there: what a graph records must not wait for the host.
    return 1.0 / (theta.float()[:, None] ** _exponents(dim, positions.device)[None, :])


def _llama3(rope: Rope) -> Tensor:
    frequencies = _plain(rope)
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    is_low = wavelengths > rope.original_max_positions / rope.low_freq_factor
    is_high = wavelengths < rope.original_max_positions / rope.high_freq_factor
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / rope.factor, blended))


def _yarn(rope: Rope) -> Tensor:
    dim = rope.rotary_dim

    def turning(num_rotations: float) -> float:
        """The dimension that turns so often over the context of pretraining."""
        return dim * math.log(rope.original_max_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = _plain(rope)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def reach(rope: Rope) -> int:
    """Tokens that the rope is stretched to: YaRN's configurations leave max_position_embeddings at the context of
    pretraining.
    """
    if rope.kind == "yarn":
        return max(rope.max_positions, int(rope.original_max_positions * rope.factor))
    return int(rope.max_positions * rope.factor) if rope.kind == "dynamic" else rope.max_positions


def rope_of(fields: Fields, scaling: Fields | None, max_positions: int, theta: float, is_phi3: bool = False) -> Rope:
    """As ``_read``, of which angles can be made. Raises ModelError."""
    try:
        rope = _read(fields, scaling, max_positions, theta, is_phi3)
        is_sound = _is_sound(rope)
    except (ArithmeticError, ValueError):  # a logarithm of nothing, or a division by it
        is_sound = False
    if not is_sound:
        raise ModelError(f"{fields.place} has an impossible rope: its numbers make no angles")
    return rope


def _is_sound(rope: Rope) -> bool:
    if not 0 < rope.attention_factor < math.inf or not 0 < reach(rope) < MAX_REACH:
        return False
    # LongRoPE has its short ones and its long ones.
    frequencies = [inverse_frequencies(rope, length) for length in (rope.original_max_positions, MAX_REACH)]
    if rope.kind == "dynamic":
        frequencies.append(_dynamic(rope, torch.tensor([0, rope.max_positions, reach(rope) - 1])))
    return all(bool(own.isfinite().all()) for own in frequencies)


def _read(fields: Fields, scaling: Fields | None, max_positions: int, theta: float, is_phi3: bool) -> Rope:
    """From ``rope_parameters`` (transformers 5) or ``rope_scaling`` with ``rope_theta`` (before). Raises ModelError.

    Phi-3's early files call LongRoPE "su" or "yarn"; and of these families it alone turns only a part of each head.
    """
    heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // heads)
    scaling = scaling or Fields({}, fields.architecture, fields.place)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if is_phi3 and kind in ("su", "yarn"):
        kind = "longrope"
    theta = scaling.number("rope_theta", fields.number("rope_theta", theta))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial) if is_phi3 else head_dim
    if theta <= 0 or not 0 < partial <= 1 or not 2 <= rotary_dim <= MAX_ROTARY_DIM or rotary_dim % 2:
        raise ModelError(f"{fields.place} has an impossible rope: {rotary_dim} of {head_dim} dimensions, theta {theta}")
    original = fields.positive(
        "original_max_position_embeddings", scaling.positive("original_max_position_embeddings", max_positions)
    )
    common: dict[str, Any] = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim, "max_positions": max_positions}
    match kind:
        case "default":
            return Rope(**common)
        case "linear" | "dynamic":
            return Rope(**common, factor=_factor(scaling))
        case "proportional":
            return Rope(**common, factor=scaling.number("factor", 1.0), partial_factor=partial)
        case "llama3":
            return Rope(
                **common,
                factor=_factor(scaling),
                original_max_positions=original,
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
            )
        case "yarn":
            factor = _factor(scaling, max_positions / original)
            return Rope(
                **common,
                factor=factor,
                original_max_positions=original,
                attention_factor=_yarn_attention(scaling, factor),
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                truncate=scaling.flag("truncate", True),
            )
        case "longrope":
            factor = scaling.number("factor", max_positions / original)
            stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
            if len(short) != rotary_dim // 2 or len(long) != rotary_dim // 2:
                raise ModelError(
                    f"the longrope factors of this {fields.architecture} are not {rotary_dim // 2} numbers each"
                )
            return Rope(
                **common,
                factor=factor,
                original_max_positions=original,
                attention_factor=scaling.number("attention_factor", stretch),
                short_factors=short,
                long_factors=long,
            )
    raise ModelError(f"the RoPE scaling {kind} of this {fields.architecture} is not supported")


def _factor(scaling: Fields, default: float | None = None) -> float:
    factor = scaling.number("factor", default)
    if factor < 1:
        raise scaling.wrong("factor", factor)
    return factor


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """DeepSeek's mscale pair divides two temperatures."""
    mscale, mscale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    both = bool(mscale and mscale_all)
    return scaling.number(
        "attention_factor",
        temperature(factor, mscale) / temperature(factor, mscale_all) if both else temperature(factor),
    )


def temperature(factor: float, mscale: float = 1.0) -> float:
    """How much attention's grows where the context does by ``factor``: YaRN, section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
