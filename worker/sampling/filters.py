"""Top-k, top-p and min-p: each keeps the likeliest tokens and drops the rest, so each is a smallest logit that may be
drawn.

Tokens that tie with the last one kept are kept: a threshold cannot tell them apart, and neither should chance. The
order is that of transformers' warpers: top-p counts mass among what top-k left; min-p compares with the likeliest
token.

Top-k and min-p thresholds are found beforehand. The nucleus of top-p alone may hold half a vocabulary, and needs no
sorting: draw without it, then ask of the one token drawn whether it is inside, that is, whether the tokens likelier
than it have less than top-p of the mass. The winner among all is the winner among those inside if it is one of them;
if it is not, it and everything below it are out, and the race is run again with the rest. That ends after 1 / top_p
rounds or fewer on average (one round in ten is repeated at 0.9), and gives what the sorted nucleus would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.sampling.tiles import WIDTH, Tiles

_LOGITS_AT_ONCE = 1 << 19
"""A pass over whole rows takes so many logits at a time: they stay in cache, and memory is bounded."""


def thresholds(
    tiles: Tiles,
    rows: Tensor,
    temperature: Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Tensor:
    """The smallest logit kept by top-k, by top-p where there is a top-k, and by min-p [m] f32; -inf where nothing is
    asked.

    rows [m] i64, temperature [m] f32, and one top-k (0: off, else below the vocabulary's size), top-p (1: off) and
    min-p (0: off) for each of the rows.
    """
    device = rows.device
    kept = torch.full((len(rows),), -torch.inf, device=device)
    by_size: dict[int, list[int]] = {}
    for i, k in enumerate(top_k):
        if k:
            # Rows of about equal k go together, so that one large k does not make all of them large.
            by_size.setdefault(-(-k.bit_length() // 3), []).append(i)
    for alike in by_size.values():
        at = torch.tensor(alike, device=device)
        kept[at] = _top_k(tiles, rows[at], temperature[at], [top_k[i] for i in alike], [top_p[i] for i in alike])
    if any(min_p):
        relative = torch.tensor(min_p, dtype=torch.float32, device=device).log_()
        kept = kept.maximum(tiles.largest[rows] + temperature * relative)
    return kept


def _top_k(tiles: Tiles, rows: Tensor, temperature: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """The threshold of top-k, and of top-p within it [m]."""
    values = tiles.leading(rows, max(top_k))
    last = torch.tensor(top_k, device=rows.device)[:, None] - 1
    smallest = values.gather(1, last)
    if min(top_p) >= 1.0:
        return smallest[:, 0]
    weights = _weights(values.clone(), tiles.largest[rows, None], temperature[:, None]).double()
    weights.masked_fill_(torch.arange(values.shape[1], device=rows.device) > last, 0.0)
    # Tokens equal to the k-th are kept as well, wherever they are, and have their share of the mass.
    num_tied = (tiles.whole(rows) >= smallest[..., None]).sum((1, 2)) - last[:, 0] - 1
    mass = weights.sum(-1) + num_tied * weights.gather(1, last)[:, 0]
    share = torch.tensor(top_p, dtype=torch.float64, device=rows.device)
    above = weights.cumsum(-1) - weights
    num_kept = (above < (share * mass)[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = values.gather(1, num_kept - 1).maximum(smallest)
    return torch.where(share < 1.0, nucleus[:, 0], smallest[:, 0])


def nucleus_mass(tiles: Tiles, rows: Tensor, temperature: Tensor, top_p: Sequence[float]) -> Tensor:
    """The mass that likelier tokens may have before a token is outside the nucleus [m] f64, in the units of
    ``mass_above``.
    """
    total = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    for part in _parts(tiles, rows):
        largest = tiles.largest[rows[part], None, None]
        weights = _weights(tiles.whole(rows[part]), largest, temperature[part, None, None])
        total[part] = weights.sum(-1).sum(-1, dtype=torch.float64)
    return total.mul_(torch.tensor(top_p, dtype=torch.float64, device=rows.device))


def mass_above(tiles: Tiles, rows: Tensor, temperature: Tensor, logits: Tensor) -> Tensor:
    """What all tokens with a larger logit than ``logits`` [m] weigh in rows [m], the likeliest token weighing 1 ->
    [m] f64.
    """
    above = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for part in _parts(tiles, rows):
        at, tile = (tiles.maxima[rows[part]] > logits[part, None]).nonzero(as_tuple=True)
        row = rows[part][at]
        values = tiles.open(row, tile)
        likelier = values > logits[part][at, None]
        weights = _weights(values, tiles.largest[row, None], temperature[part][at, None]).mul_(likelier)
        above[part] = above[part].index_add(0, at, weights.sum(-1, dtype=torch.float64))
    return above


def _weights(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Logits, overwritten, as probabilities, but for a factor: the likeliest token weighs 1."""
    return values.sub_(largest).div_(temperature).exp_()


def _parts(tiles: Tiles, rows: Tensor) -> list[slice]:
    step = max(1, _LOGITS_AT_ONCE // (tiles.num_tiles * WIDTH))
    return [slice(i, i + step) for i in range(0, len(rows), step)]
