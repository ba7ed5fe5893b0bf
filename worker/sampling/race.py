"""One exact draw for each row, keyed by (seed, position), as an exponential race over the vocabulary.

Every token i has its own exponential clock E_i, and the token with the smallest E_i / p_i wins: it does so with
probability p_i (the Gumbel-max trick in other words; Maddison et al. 2014, "A* Sampling", section 2). E_i is a
function of (seed, position, i) alone: not of the batch, the other rows, the logits or the filters. So a sequence's
tokens are the same in any company, and two models that share seed and position share their noise, which is what later
makes drafts agree with their target as often as possible.

Clocks are made tile by tile. The smallest of 64 exponentials is Exp(64), any of the 64 is equally likely to have it,
and, an exponential having no memory, the others are that minimum plus independent Exp(1) again. So one number for
each tile bounds what any of its tokens can reach, and only tiles whose bound beats the best token found are opened: a
dozen of 2,374, not 152 k logarithms a row.

Bits: BLAKE2b of (seed, position) starts a SplitMix64 stream (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom
Number Generators"), whose n-th word is computed on its own, in wrapping 64-bit integers that every device computes
alike.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from worker.sampling.tiles import WIDTH, Tiles

FIRST_TILES = 32
"""Tiles opened before it is known how many are needed: by measurement (benchmarks/engine.md)."""
SLACK = 1e-3
"""How far rounding may put a bound below what it bounds, many times over."""

_TILE_WORDS = 1 << 40
"""Tokens take the words from 0 on, tiles those from here."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_KEY = struct.Struct("<QQ")
_WORD = struct.Struct("<q")


def start(seed: int, position: int) -> bytes:
    """Of the noise of both, in [0, 2**64): a word of 8 bytes."""
    return blake2b(_KEY.pack(seed, position), digest_size=8).digest()


def streams(keys: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The start of the noise of each (seed, position) -> [n] i64."""
    starts = [_WORD.unpack(start(*key))[0] for key in keys]
    return torch.tensor(starts, dtype=torch.int64, device=device)


def words(starts: Tensor, at: Tensor) -> Tensor:
    """Word ``at`` of each stream: i64 tensors that broadcast -> i64, uniform over all 64 bits."""
    z = (at * _GAMMA).add(starts)
    shifted = torch.empty_like(z)
    # Tensors shift with the sign; the mask makes it the logical shift of the paper. All in place: in a large batch
    # fresh memory costs more than the arithmetic.
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    torch.bitwise_right_shift(z, 31, out=shifted)
    return z.bitwise_xor_(shifted.bitwise_and_((1 << 33) - 1))


def exponentials(bits: Tensor) -> Tensor:
    """Words i64 -> Exp(1) f32, from their upper 53 bits, finite and above zero.

    The uniform's fine end is at zero, where the race is decided. Logarithms are float64 before they are rounded, so
    that every device has the same.
    """
    upper = (bits >> 11).bitwise_and_((1 << 53) - 1).bitwise_or_(1)
    uniform = upper.to(torch.float32).mul_(2.0**-53).clamp_(max=1.0 - 2.0**-24)
    return uniform.double().neg_().log1p_().neg_().float()


def logarithms(x: Tensor) -> Tensor:
    """Natural, of f32, as exact as f32 can say them."""
    return x.double().log_().float()


def clocks(starts: Tensor, tiles: Tensor) -> Tensor:
    """The clocks of all tokens in tiles [m, k] i64, for streams [m] i64 -> [m, k, 64] f32."""
    tile_bits = words(starts[:, None], tiles + _TILE_WORDS)
    first = (tile_bits & (WIDTH - 1))[..., None]
    offsets = torch.arange(WIDTH, device=tiles.device)
    own = exponentials(words(starts[:, None, None], (tiles * WIDTH)[..., None] + offsets))
    return own.masked_fill_(offsets == first, 0.0).add_(exponentials(tile_bits)[..., None] / WIDTH)


def draw(tiles: Tiles, rows: Tensor, starts: Tensor, temperature: Tensor, threshold: Tensor) -> Tensor:
    """The winner of each row's race among its tokens of at least ``threshold``.

    rows [m] i64: which rows of ``tiles``; starts [m] i64, temperature [m] f32 (> 0), threshold [m] f32 (a logit, at
    most the largest) -> token ids [m] i64. A row that is not a distribution gets any id.
    """
    largest = tiles.largest[rows]
    maxima = tiles.maxima[rows]
    every_tile = torch.arange(tiles.num_tiles, device=rows.device)
    earliest = exponentials(words(starts[:, None], every_tile + _TILE_WORDS))
    bounds = (maxima - largest[:, None]).div_(temperature[:, None]).sub_(earliest.log_()).add_(math.log(WIDTH))
    bounds.masked_fill_(maxima < threshold[:, None], -torch.inf)

    winners = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    left = torch.arange(len(rows), device=rows.device)
    num = min(FIRST_TILES, tiles.num_tiles)
    while True:
        # One bound more than tiles to open: the best of those that stay closed.
        bound, opened = bounds[left].topk(min(num + 1, tiles.num_tiles))
        opened = opened[:, :num]
        values = tiles.open(rows[left, None], opened)
        scores = (values - largest[left, None, None]).div_(temperature[left, None, None])
        scores.sub_(logarithms(clocks(starts[left], opened))).masked_fill_(
            values < threshold[left, None, None], -torch.inf
        )
        best, at = scores.flatten(1).max(-1)
        winners[left] = opened.gather(1, at[:, None] // WIDTH)[:, 0] * WIDTH + at % WIDTH
        if num == tiles.num_tiles:
            return winners
        undecided = bound[:, num] + SLACK >= best
        if not undecided.any():
            return winners
        left = left[undecided]
        # As many as may still win: the second opening is the last.
        num = int((bounds[left] + SLACK >= best[undecided, None]).sum(-1).max())
