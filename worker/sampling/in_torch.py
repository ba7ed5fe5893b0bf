"""A batch's tokens drawn by torch's own operations: where no kernels are, and what kernels are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.terms import Sampling
from worker.sampling import race
from worker.sampling.filters import mass_above, mass_from, min_p_threshold, top_k_threshold
from worker.sampling.tiles import Tiles
from worker.sampling.wishes import UNUSABLE

SMALLEST_TEMPERATURE = 1e-30
"""Smaller ones would be zero in float32; at this one only the exact maximum can win already."""


def draw(logits: Tensor, asked: Sequence[Sampling], keys: Sequence[tuple[int, int]]) -> Tensor:
    """logits [n, vocab_size] f32, n of ``asked`` and of ``keys`` (seed, position) -> token ids [n] i64, UNUSABLE where
    the logits are no distribution."""
    tiles = Tiles(logits)
    drawn = [i for i, sampling in enumerate(asked) if sampling.temperature > 0]
    if len(drawn) < len(asked):
        chosen = tiles.argmax()
        if drawn:
            chosen[drawn] = _race(tiles, asked, keys, drawn, logits.shape[1])
    else:
        chosen = _race(tiles, asked, keys, drawn, logits.shape[1])
    return chosen.masked_fill_(~tiles.largest.isfinite(), UNUSABLE)


def _race(
    tiles: Tiles, every: Sequence[Sampling], keys: Sequence[tuple[int, int]], drawn: list[int], vocab_size: int
) -> Tensor:
    """Token ids [len(drawn)] i64 for the rows that are not greedy."""
    device = tiles.largest.device
    at = torch.tensor(drawn, device=device)
    asked = [every[i] for i in drawn]
    temperature = torch.tensor([max(s.temperature, SMALLEST_TEMPERATURE) for s in asked], device=device)
    starts = race.streams([keys[i] for i in drawn], device)
    top_k = [s.top_k if s.top_k < vocab_size else 0 for s in asked]
    threshold = top_k_threshold(tiles, at, top_k)
    nucleus = [i for i, s in enumerate(asked) if s.top_p < 1.0]
    if nucleus:
        top_p = torch.tensor([asked[i].top_p for i in nucleus], dtype=torch.float64, device=device)
        mass = top_p * mass_from(tiles, at[nucleus], temperature[nucleus], threshold[nucleus])
    if any(s.min_p for s in asked):
        threshold = threshold.maximum(min_p_threshold(tiles, at, temperature, [s.min_p for s in asked]))
    winners = race.draw(tiles, at, starts, temperature, threshold)

    if nucleus:
        left = torch.tensor(nucleus, device=device)
        while True:
            drawn_logits = tiles.at(at[left], winners[left])
            above = mass_above(tiles, at[left], temperature[left], drawn_logits)
            outside = (above >= mass) & (above > 0)
            if not outside.any():
                break
            left, mass = left[outside], mass[outside]
            threshold[left] = drawn_logits[outside].nextafter(torch.tensor(torch.inf, device=device))
            winners[left] = race.draw(tiles, at[left], starts[left], temperature[left], threshold[left])
    return winners
