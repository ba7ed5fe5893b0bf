"""Top-k, top-p and min-p: each keeps the likeliest tokens and drops the rest, so each is a smallest logit to be drawn.

Tokens that tie with the last one kept are kept: a threshold cannot tell them apart, and neither should chance. The
order is that of transformers' warpers: top-p counts mass among what top-k left; min-p compares with the likeliest.

Top-k and min-p thresholds are found beforehand. The nucleus of top-p may hold half a vocabulary, and needs no sorting:
draw without it, then ask of the one token drawn whether it is inside, that is, whether the tokens likelier than it
have less than top-p of the mass. The winner among all is the winner among those inside if it is one of them; if it is
not, it and everything below it are out, and the race is run again with the rest. That ends after 1 / top_p rounds or
fewer on average (one round in ten is repeated at 0.9), and gives what the sorted nucleus would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.sampling.race import logarithms
from worker.sampling.tiles import WIDTH, Tiles

_LOGITS_AT_ONCE = 1 << 19
"""A pass over whole rows takes so many logits at a time: they stay in cache, and memory is bounded."""


def top_k_threshold(tiles: Tiles, rows: Tensor, top_k: Sequence[int]) -> Tensor:
    """The k-th largest logit of rows [m], one k each (0: off; below the vocabulary's size) -> [m] f32, or -inf."""
    kept = torch.full((len(rows),), -torch.inf, device=rows.device)
    by_size: dict[int, list[int]] = {}
    for i, k in enumerate(top_k):
        if k:
            # Rows of about equal k go together, so that one large k does not make all of them large.
            by_size.setdefault(-(-k.bit_length() // 3), []).append(i)
    for alike in by_size.values():
        at = torch.tensor(alike, device=rows.device)
        last = torch.tensor([top_k[i] - 1 for i in alike], device=rows.device)
        kept[at] = tiles.leading(rows[at], max(top_k[i] for i in alike)).gather(1, last[:, None])[:, 0]
    return kept


def min_p_threshold(tiles: Tiles, rows: Tensor, temperature: Tensor, min_p: Sequence[float]) -> Tensor:
    """The logit of min_p times the largest probability in rows [m], for one min_p each (0: off) -> [m] f32, or -inf."""
    relative = logarithms(torch.tensor(min_p, dtype=torch.float32, device=rows.device))
    return tiles.largest[rows] + temperature * relative


def mass_from(tiles: Tiles, rows: Tensor, temperature: Tensor, threshold: Tensor) -> Tensor:
    """What all tokens of at least ``threshold`` [m] weigh in rows [m], the likeliest token weighing 1 -> [m] f64."""
    mass = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    bounded = threshold > -torch.inf
    some, all_ = bounded.nonzero()[:, 0], (~bounded).nonzero()[:, 0]
    # As much as above the next smaller number.
    below = threshold[some].nextafter(torch.tensor(-torch.inf, device=rows.device))
    mass[some] = mass_above(tiles, rows[some], temperature[some], below)
    for part in _parts(tiles, all_):
        largest = tiles.largest[rows[part], None, None]
        weights = _weights(tiles.whole(rows[part]), largest, temperature[part, None, None])
        mass[part] = weights.sum(-1).sum(-1, dtype=torch.float64)
    return mass


def mass_above(tiles: Tiles, rows: Tensor, temperature: Tensor, logits: Tensor) -> Tensor:
    """What all tokens with a larger logit than ``logits`` [m] weigh in rows [m], the likeliest token weighing 1 ->
    [m] f64.
    """
    above = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for part in _parts(tiles, torch.arange(len(rows), device=rows.device)):
        at, tile = (tiles.maxima[rows[part]] > logits[part, None]).nonzero(as_tuple=True)
        row = rows[part][at]
        values = tiles.open(row, tile)
        likelier = values > logits[part][at, None]
        weights = _weights(values, tiles.largest[row, None], temperature[part][at, None]).mul_(likelier)
        above.index_add_(0, part[at], weights.sum(-1, dtype=torch.float64))
    return above


def _weights(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Logits, overwritten, as probabilities, but for a factor: the likeliest token weighs 1."""
    return values.sub_(largest).div_(temperature).exp_()


def _parts(tiles: Tiles, indices: Tensor) -> Sequence[Tensor]:
    step = max(1, _LOGITS_AT_ONCE // (tiles.num_tiles * WIDTH))
    return [indices[i : i + step] for i in range(0, len(indices), step)]
