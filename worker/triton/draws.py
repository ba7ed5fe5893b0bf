"""Tokens from logits on the device, without sorting: what ``worker.sampling`` does on the CPU, a program for each row.

The vocabulary lies in tiles of 64 tokens. One pass takes of each tile its largest logit and its mass; all that follows
opens the tiles that can matter and no others. The k-th largest logit is found by halving what it may be. The nucleus is
not looked for: a token is drawn without it, and drawn again among the likelier ones if it turns out to be outside.

The noise is that of ``worker.sampling.race``: the same words of the same streams, to the bit. Their logarithms are
taken in float64 and rounded, where the CPU's are off by a unit in the last place at times, so both draw the same token
from the same logits unless two tokens are that close.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(64)
"""As in ``worker.sampling.tiles``."""
OPEN = tl.constexpr(32)
"""Tiles at once."""

STEP = ("masses", "starts", "temperatures", "top_ks", "top_ps", "min_ps")
"""Parts of larger pieces, aligned anyhow: else the kernels would be compiled anew for some numbers of rows."""

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_TILE_WORDS = tl.constexpr(1 << 40)
_LOG_WIDTH = tl.constexpr(4.1588830833596715)
_SLACK = tl.constexpr(1e-3)
_LOWEST_KEY = tl.constexpr(-2139095041)
"""Of -inf; see ``_key``."""


@triton.jit
def _words(start, at):
    """Word ``at`` of a stream: u64."""
    z = at.to(tl.uint64) * _GAMMA + start
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _exponentials(bits):
    """Words -> Exp(1) f32."""
    upper = ((bits >> 11) | 1).to(tl.int64)
    uniform = tl.minimum(upper.to(tl.float32) * (2.0**-53), 1.0 - 2.0**-24).to(tl.float64)
    # Below 2**-20 the difference to 1 loses more than the third term of the series is worth.
    short = uniform + uniform * uniform * 0.5
    return tl.where(uniform < 2.0**-20, short, -tl.log(1.0 - uniform)).to(tl.float32)


@triton.jit
def _log(x):
    """Natural, of f32; what f32 instructions offer is too coarse near 1."""
    return tl.log(x.to(tl.float64)).to(tl.float32)


@triton.jit
def _number(key):
    """The f32 whose place in the order of all f32 is ``key``; the inverse of ``_key``."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _key(x):
    """f32 -> i64, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _listed(wanted, ids, notes):
    """Notes the tiles that are wanted, and returns how many there are."""
    place = tl.cumsum(wanted.to(tl.int32), 0) - 1
    # One thread reads what another wrote: the last list to its end, then this one.
    tl.debug_barrier()
    tl.store(notes + place, ids, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _open(logits, notes, first, num, vocab_size):
    """OPEN noted tiles from the first on: tile ids [OPEN], token ids and logits [OPEN, WIDTH], -inf where there is
    none."""
    i = first + tl.arange(0, OPEN)
    tile = tl.load(notes + i, mask=i < num, other=0)
    token = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = (i < num)[:, None] & (token < vocab_size)
    return tile, token, tl.load(logits + token, mask=here, other=-float("inf"))


@triton.jit
def mask(logits, rows, bits, vocab_size, num_words, row_stride, WORDS: tl.constexpr):
    """Grid (masked rows, num_words / WORDS, rounded up): logits of rows [count] i64 go to -inf where their bit in bits
    [count, num_words] i32 is not set. NaN and +inf stay.
    """
    row = tl.load(rows + tl.program_id(0))
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    kept = tl.load(bits + tl.program_id(0).to(tl.int64) * num_words + word, mask=word < num_words, other=0)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    at = logits + row * row_stride + token
    goes = ((kept[:, None] >> place[None, :]) & 1) == 0
    x = tl.load(at, mask=goes & (token < vocab_size), other=float("inf"))
    tl.store(at, -float("inf"), mask=goes & (token < vocab_size) & (x < float("inf")))


@triton.jit(do_not_specialize=STEP)
def survey(logits, temperatures, maxima, masses, vocab_size, num_tiles, row_stride, TILES: tl.constexpr):
    """Grid (rows, num_tiles / TILES, rounded up): of each tile its largest logit (inf where one is NaN) and what its
    tokens weigh, the largest weighing 1. maxima and masses [rows, num_tiles] f32; temperatures [rows] f32.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    token = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=-float("inf"))
    x = tl.where(x == x, x, float("inf"))
    largest = tl.max(x, 1)
    level = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    mass = tl.sum(tl.exp((x - level[:, None]) / temperature), 1)
    tl.store(maxima + row * num_tiles + tile, largest, mask=tile < num_tiles)
    tl.store(masses + row * num_tiles + tile, mass, mask=tile < num_tiles)


@triton.jit(do_not_specialize=STEP)
def draw(
    logits, maxima, masses, starts, temperatures, top_ks, top_ps, min_ps, notes, chosen, vocab_size, num_tiles,
    row_stride, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid (rows): chosen [rows] i64, -1 where the logits are no distribution.

    starts [rows] i64: of the streams; temperatures (0: the likeliest token), top_ps (1: all), min_ps (0: off) [rows]
    f32, top_ks [rows] i32 (0: off); notes [rows, num_tiles] i32: scratch. BLOCK_T >= num_tiles.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    notes += row * num_tiles
    ids = tl.arange(0, BLOCK_T)
    is_tile = ids < num_tiles
    tile_maxima = tl.load(maxima + row * num_tiles + ids, mask=is_tile, other=-float("inf"))
    largest = tl.max(tile_maxima, 0)
    if tl.abs(largest) == float("inf"):
        tl.store(chosen + row, -1)
        return
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        tile = tl.argmax(tile_maxima, 0)
        token = tile * WIDTH + tl.arange(0, WIDTH)
        x = tl.load(logits + token, mask=token < vocab_size, other=-float("inf"))
        tl.store(chosen + row, (tile * WIDTH + tl.argmax(x, 0)).to(tl.int64))
        return
    # Smaller ones are zero to f32; at this one only the exact maximum can win already.
    temperature = tl.maximum(temperature, 1e-30)

    threshold = largest * 0.0 - float("inf")
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    mass = largest.to(tl.float64) * 0.0
    if (top_k > 0) & (top_k < vocab_size):
        # Of the k largest tiles each has a logit no smaller than the smallest of their maxima: the k-th largest logit
        # is no smaller either, and it is in a tile whose maximum is not.
        low, high = largest.to(tl.int64) * 0 + _LOWEST_KEY, _key(largest) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            enough = tl.sum((tile_maxima >= _number(middle)).to(tl.int32), 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        num = _listed(is_tile & (tile_maxima >= _number(low)), ids, notes)
        high = _key(largest) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            at_least = _number(middle)
            count = num * 0
            for first in range(0, num, OPEN):
                _, _, x = _open(logits, notes, first, num, vocab_size)
                count += tl.sum(tl.sum((x >= at_least).to(tl.int32), 1), 0)
            low = tl.where(count >= top_k, middle, low)
            # Where exactly k are counted, any number between the k-th and the next will do.
            high = tl.where(count > top_k, high, middle)
            high = tl.where(count == top_k, middle + 1, high)
        threshold = _number(low)
        if top_p < 1:
            for first in range(0, num, OPEN):
                _, _, x = _open(logits, notes, first, num, vocab_size)
                weights = tl.where(x >= threshold, tl.exp((x - largest) / temperature), 0.0)
                mass += tl.sum(tl.sum(weights, 1).to(tl.float64), 0)
    elif top_p < 1:
        weights = tl.load(masses + row * num_tiles + ids, mask=is_tile, other=0.0)
        weights *= tl.exp((tile_maxima - largest) / temperature)
        mass += tl.sum(weights.to(tl.float64), 0)
    mass *= top_p.to(tl.float64)
    if min_p > 0:
        threshold = tl.maximum(threshold, largest + temperature * _log(min_p))

    start = tl.load(starts + row).to(tl.uint64)
    earliest = _exponentials(_words(start, ids.to(tl.int64) + _TILE_WORDS))
    bounds = (tile_maxima - largest) / temperature - _log(earliest) + _LOG_WIDTH
    # Beyond a token that was drawn and is outside of the nucleus: only what is likelier.
    above_this = largest * 0.0 - float("inf")
    winner = tl.load(notes, mask=False, other=0)
    is_drawn = False
    while not is_drawn:
        reachable = is_tile & (tile_maxima >= threshold) & (tile_maxima > above_this)
        own_bounds = tl.where(reachable, bounds, -float("inf"))
        best = largest * 0.0 - float("inf")
        # The most promising tile first, then all that may still beat what it had.
        for attempt in range(0, 2):
            promising = tl.where(attempt == 0, ids == tl.argmax(own_bounds, 0), own_bounds + _SLACK >= best)
            num = _listed(reachable & promising, ids, notes)
            for first in range(0, num, OPEN):
                tile, token, x = _open(logits, notes, first, num, vocab_size)
                tile_bits = _words(start, tile.to(tl.int64) + _TILE_WORDS)
                clock = _exponentials(_words(start, token.to(tl.int64)))
                is_first = (token % WIDTH).to(tl.uint64) == (tile_bits & (WIDTH - 1))[:, None]
                clock = tl.where(is_first, 0.0, clock) + (_exponentials(tile_bits) / WIDTH)[:, None]
                scores = (x - largest) / temperature - _log(clock)
                scores = tl.where((x >= threshold) & (x > above_this), scores, -float("inf"))
                leading = tl.max(tl.max(scores, 1), 0)
                if leading > best:
                    best = leading
                    winner = tl.max(tl.max(tl.where(scores == leading, token, -1), 1), 0)
        is_drawn = True
        if top_p < 1:
            drawn = tl.load(logits + winner)
            num = _listed(is_tile & (tile_maxima > drawn), ids, notes)
            likelier = mass * 0.0
            for first in range(0, num, OPEN):
                _, _, x = _open(logits, notes, first, num, vocab_size)
                weights = tl.where(x > drawn, tl.exp((x - largest) / temperature), 0.0)
                likelier += tl.sum(tl.sum(weights, 1).to(tl.float64), 0)
            # It is likelier than the one before it, or nothing is: a device must not turn here for ever.
            if (likelier >= mass) & (likelier > 0) & (drawn > above_this):
                above_this = drawn
                is_drawn = False
    tl.store(chosen + row, winner.to(tl.int64))
