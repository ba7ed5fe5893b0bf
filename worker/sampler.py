"""Logits to tokens: one batched sample a step, in float32, exact.

For each row, in the order of ``policies.terms.Sampling``: penalties, logit bias, forbidden tokens, temperature,
top-k, top-p, min-p, then one draw that is a function of (seed, position) alone. What no row asks for is not computed:
a batch of greedy rows is one pass for the maxima of the tiles. The parts are in ``worker.sampling``; measurements in
benchmarks/engine.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.terms import Sampling
from policies.wire import TokenLogprob
from worker.sampling import race
from worker.sampling.adjust import Adjustments, adjust
from worker.sampling.filters import mass_above, mass_from, min_p_threshold, top_k_threshold
from worker.sampling.tiles import Tiles

UNUSABLE = -1
"""Sampled instead of a token where the logits are no distribution (NaN, +inf, or nothing above -inf)."""

SMALLEST_TEMPERATURE = 1e-30
"""Smaller ones would be zero in float32; at this one only the exact maximum can win already."""


@dataclass(slots=True)
class Row:
    """One sequence that wants its next token."""

    sampling: Sampling
    seed: int
    """The request's seed plus the sequence's index, mod 2**64."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Sampled so far; the position of the token to sample is the length of prompt and output together."""
    state: object | None = None
    """The sampler's own notes on this sequence; made anew from the lists whenever it is None."""


@dataclass(slots=True)
class Sampled:
    """One token for each row, in order."""

    token_ids: list[int]
    """UNUSABLE for a row whose logits are no distribution: that request has failed, its neighbours have not."""
    logprobs: list[TokenLogprob | None]


@dataclass(slots=True)
class _Notes:
    adjustments: Adjustments | None


class Sampler:
    """Samples for one model. Keeps nothing of any sequence but what it leaves in ``Row.state``."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[Row]) -> Sampled:
        """logits [n, vocab_size] f32, overwritten; n rows -> n tokens, and the log-probabilities of those that ask.

        Log-probabilities are natural, of the model's own distribution: before penalties and temperature.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows), self.vocab_size)
        asking = [i for i, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        adjusted = []
        for i, row in enumerate(rows):
            notes = row.state
            if not isinstance(notes, _Notes):
                adjustments = Adjustments.of(row.sampling, row.prompt_token_ids, self.eos_token_ids, self.vocab_size)
                row.state = notes = _Notes(adjustments)
            if notes.adjustments is not None:
                adjusted.append((i, notes.adjustments, row.output_token_ids))
        model_logits = None
        if asking:
            # What follows writes into the rows that are adjusted.
            whole = len(asking) == len(rows) and not adjusted
            model_logits = logits if whole else logits.index_select(0, torch.tensor(asking, device=logits.device))
        if adjusted:
            adjust(logits, adjusted)

        tiles = Tiles(logits)
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
        if len(drawn) < len(rows):
            chosen = tiles.argmax()
            if drawn:
                chosen[drawn] = self._draw(tiles, rows, drawn)
        else:
            chosen = self._draw(tiles, rows, drawn)
        token_ids: list[int] = chosen.masked_fill_(~tiles.largest.isfinite(), UNUSABLE).tolist()

        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if model_logits is not None:
            found = _logprobs(
                model_logits,
                [token_ids[i] for i in asking],
                [rows[i].sampling.num_logprobs or 0 for i in asking],
            )
            for i, logprob in zip(asking, found, strict=True):
                logprobs[i] = logprob
        return Sampled(token_ids, logprobs)

    def _draw(self, tiles: Tiles, rows: Sequence[Row], drawn: list[int]) -> Tensor:
        """Token ids [len(drawn)] i64 for the rows that are not greedy."""
        device = tiles.largest.device
        at = torch.tensor(drawn, device=device)
        chosen = [rows[i] for i in drawn]
        asked = [row.sampling for row in chosen]
        temperature = torch.tensor([max(s.temperature, SMALLEST_TEMPERATURE) for s in asked], device=device)
        keys = [(row.seed, len(row.prompt_token_ids) + len(row.output_token_ids)) for row in chosen]
        starts = race.streams(keys, device)
        top_k = [s.top_k if s.top_k < self.vocab_size else 0 for s in asked]
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


def _logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprob | None]:
    """logits [m, vocab_size] as the model gave them, m sampled tokens, and how many of the likeliest each row wants
    (0: none).
    """
    num = min(max(nums), logits.shape[1])
    total = logits.logsumexp(-1, keepdim=True)
    sampled = torch.tensor(token_ids, device=logits.device).clamp_(min=0)[:, None]
    own = (logits.gather(1, sampled) - total)[:, 0].tolist()
    top_ids: list[list[int]] = [[]] * len(nums)
    top: list[list[float]] = [[]] * len(nums)
    if num:
        values, ids = Tiles(logits).likeliest(num)
        top_ids, top = ids.tolist(), (values - total).tolist()
    return [
        None if token_id == UNUSABLE else TokenLogprob(own[i], top_ids[i][: nums[i]], top[i][: nums[i]])
        for i, token_id in enumerate(token_ids)
    ]
