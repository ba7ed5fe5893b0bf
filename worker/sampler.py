"""Logits to tokens: one batched sample a step, in float32, exact.

For each row, in the order of ``policies.terms.Sampling``: penalties, logit bias, forbidden tokens and those that a
grammar does not allow, temperature, top-k, top-p, min-p, then one draw that is a function of (seed, position) alone.
What no row asks for is not computed: a batch of greedy rows is one pass for the maxima of the tiles, and none where the
model's head found them on its way. Three ways lead to the same tokens: compiled kernels on the CPU, Triton's on the
device, and torch. The parts are in ``worker.sampling``; measurements in benchmarks/engine.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.terms import Sampling
from policies.wire import TokenLogprob
from worker.native import MAX_TRIES, Library, library
from worker.sampling import in_torch, race
from worker.sampling.adjust import Adjusted, Adjustments, adjust
from worker.sampling.masks import Masks
from worker.sampling.tiles import Tiles
from worker.sampling.wishes import NO_NOISE, UNUSABLE, Wishes, wish_of
from worker.transfer import Arriving, rows_of, sent
from worker.triton import has_triton

NOT_FORCED = -1
"""In place of the token that comes in any case."""
_FEW_CHANGED = 512
"""Logits of a row: of more the maxima are found sooner for all of them."""


@dataclass(slots=True)
class Row:
    """One sequence that wants its next token."""

    sampling: Sampling
    seed: int
    """The request's seed plus the sequence's index, mod 2**64."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Sampled so far; the position of the token to sample is the length of prompt, output and draft together."""
    state: object | None = None
    """The sampler's own notes on this sequence; made anew from the lists whenever it is None."""
    draft_token_ids: Sequence[int] = ()
    """Come after the output as far as this row is concerned: it counts only if they turn out to be right."""


@dataclass(slots=True)
class Sampled:
    """One token for each row, in order."""

    token_ids: list[int]
    """UNUSABLE for a row whose logits are no distribution: that request has failed, its neighbours have not."""
    logprobs: list[TokenLogprob | None]

    def take(self) -> Sampled:
        """As Pending has it: they are here."""
        return self


class Pending:
    """A step's tokens, on their way from the device: to be had there at once, and here when they have arrived."""

    def __init__(self, token_ids: Tensor, logprobs: _Logprobs | None) -> None:
        self.token_ids = token_ids
        """[n] i64, where they were sampled; UNUSABLE ones too."""
        self._logprobs = logprobs
        self._arriving = Arriving([token_ids, *(logprobs.tensors if logprobs is not None else ())])

    def take(self) -> Sampled:
        """Waits for them."""
        arrived, *others = self._arriving.take()
        token_ids: list[int] = arrived.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            self._logprobs.fill(logprobs, token_ids, others)
        return Sampled(token_ids, logprobs)


@dataclass(slots=True)
class _Notes:
    adjustments: Adjustments | None
    wish: bytes


class Sampler:
    """Samples for one model. Keeps nothing of any sequence but what it leaves in ``Row.state``."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], is_compiled: bool = True, by_row: bool = False
    ) -> None:
        """``is_compiled``: by the compiled kernels, on a CPU that has them. ``by_row``: nothing is added up or raised
        to a power for several rows at once, so that each has the same bits in any company."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._is_compiled, self._by_row = is_compiled, by_row

    def sample(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None = None, masks: Masks | None = None
    ) -> Sampled:
        """``start``, and what came of it."""
        return self.start(logits, rows, maxima, masks).take()

    def start(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None = None, masks: Masks | None = None
    ) -> Pending | Sampled:
        """logits [n, vocab_size] f32, overwritten; n rows -> n tokens, and the log-probabilities of those that ask.
        maxima: of each 32 of them (see Library.maxima), if they are known; overwritten too. ``masks``: of the rows that
        may not have any token; where what they leave is checked, the tokens are waited for.

        Log-probabilities are natural, of the model's own distribution: before penalties and temperature.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows), self.vocab_size)
        asking = [i for i, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        adjusted: list[Adjusted] = []
        begun: dict[tuple[int, int], _Notes] = {}
        for i, row in enumerate(rows):
            notes = row.state
            if not isinstance(notes, _Notes):
                row.state = notes = self._noted(row, begun)
            if notes.adjustments is not None and (masks is None or i not in masks.ending):
                adjusted.append((i, notes.adjustments, row.output_token_ids, row.draft_token_ids))
        kernels = library() if self._is_compiled and (maxima is not None or logits.device.type == "cpu") else None
        if kernels is not None and maxima is not None and not (asking or adjusted):
            # Mostly so, and nothing of torch's: behind a step that has read all weights its code is far away.
            return _sampled(self._checked(logits, rows, maxima, masks, kernels))
        with torch.inference_mode():
            return self._start(logits, rows, maxima, masks, kernels, asking, adjusted)

    def _noted(self, row: Row, begun: dict[tuple[int, int], _Notes]) -> _Notes:
        """``begun``: with this step, by what the answers of one request share; what it takes to read a long prompt and
        many wishes is not taken for each of them."""
        key = id(row.sampling), id(row.prompt_token_ids)
        known = begun.get(key)
        if known is not None:
            return _Notes(None if known.adjustments is None else known.adjustments.twin(), known.wish)
        adjustments = Adjustments.of(row.sampling, row.prompt_token_ids, self.eos_token_ids, self.vocab_size)
        begun[key] = _Notes(adjustments, wish_of(row.sampling))
        return begun[key]

    def _start(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        maxima: Tensor | None,
        masks: Masks | None,
        kernels: Library | None,
        asking: list[int],
        adjusted: list[Adjusted],
    ) -> Pending | Sampled:
        """``asking`` for log-probabilities, rows; ``adjusted``: see ``adjust``."""
        ranks = asking_at = model_logits = None
        if asking:
            asking_at = sent(np.array(asking), logits.device)
            nums = [rows[i].sampling.num_logprobs or 0 for i in asking]
            num = min(max(nums), self.vocab_size)
            if kernels is not None and num <= MAX_TRIES:
                if maxima is None:
                    maxima = kernels.maxima(logits)
                ranks = kernels.rank(logits, maxima, num, asking)
            # What follows writes into the rows that are adjusted.
            stays = not adjusted and masks is None and (ranks is not None or len(asking) == len(rows))
            model_logits = logits if stays else logits.index_select(0, asking_at)
        changed = adjust(logits, adjusted, kernels, maxima) if adjusted else None

        if kernels is not None:
            if maxima is None:
                maxima = kernels.maxima(logits)
            elif changed is not None and len(changed) < _FEW_CHANGED * len(rows):
                kernels.refresh_maxima(logits, maxima, changed)
            elif adjusted:  # much of many rows
                maxima.copy_(kernels.maxima(logits))
        if kernels is None and (masks is None or not (masks.check or masks.forced)):
            if masks is not None:
                masks.apply(logits)
            chosen = self._chosen(logits, rows)
        else:
            ranked = self._checked(logits, rows, maxima, masks, kernels)
            if kernels is not None and model_logits is None:
                return _sampled(ranked)
            chosen = torch.tensor([tokens[0] for tokens in ranked], device=logits.device)
        logprobs = None
        if model_logits is not None and asking_at is not None:
            own = chosen if len(asking) == len(rows) else chosen.index_select(0, asking_at)
            at = asking_at if len(model_logits) == len(rows) else torch.arange(len(asking), device=logits.device)
            own_logits = model_logits[at, own.clamp(min=0)]
            totals, values, ids = ranks or _ranked(model_logits, num, self._by_row)
            tops = (ids, values - totals[:, None]) if num else ()
            logprobs = _Logprobs(asking, nums, (own_logits - totals, *tops))
        return Pending(chosen, logprobs)

    def _checked(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None, masks: Masks | None, kernels: Library | None
    ) -> list[list[int]]:
        """A token of each row by its mask, once whoever checks them has nothing more to say against any, and behind it
        perhaps others. ``maxima``: there are some wherever there are kernels."""
        draw = self._drawer(logits, rows, maxima, kernels)
        if masks is None:
            return draw(1, None, None)
        ranked, check = draw(1, None, masks), masks.check
        while check is not None and (again := check.refused(ranked)) is not None:
            for row, token_id in again.forced.items():
                ranked[row] = [token_id]
            # Of a row with a mask one token is asked for.
            for some, num_tries in ((again.rows, 1), (again.more, MAX_TRIES)):
                for at, tokens in zip(some, draw(num_tries, some, again) if some else (), strict=True):
                    ranked[at] = tokens
            check = again.check
        return ranked

    def _drawer(
        self, logits: Tensor, rows: Sequence[Row], maxima: Tensor | None, kernels: Library | None
    ) -> Callable[[int, Sequence[int] | None, Masks | None], list[list[int]]]:
        """As Library.draw, by so many tries, of some of the rows, by their masks; by another way than the compiled
        kernels one token of each row."""
        if kernels is not None:
            assert maxima is not None
            return partial(_drawn, kernels, logits, maxima, _wishes(rows))

        def draw(_: int, some: Sequence[int] | None, masks: Masks | None) -> list[list[int]]:
            if masks is not None:
                masks.apply(logits)
            # All of them, since nobody else's token changes: it saves copies of the rows.
            every: list[list[int]] = self._chosen(logits, rows)[:, None].tolist()
            known = sorted(masks.forced) if masks is not None and some is None else []
            if masks is not None and known:
                largest: list[float] = rows_of(logits, known).amax(1).tolist()
                for row, most in zip(known, largest, strict=True):
                    every[row] = [masks.forced[row] if most < math.inf else UNUSABLE]
            return every if some is None else [every[row] for row in some]

        return draw

    def _chosen(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Token ids [n] i64, UNUSABLE ones too, where there are no compiled kernels."""
        asked, keys, device = [row.sampling for row in rows], [_key(row) for row in rows], logits.device
        if has_triton(device):
            from worker.sampling import on_device

            if on_device.agrees(device, self.vocab_size):
                return on_device.draw(logits, Wishes.of(asked, keys, device))
        if not self._by_row or not rows:
            return in_torch.draw(logits, asked, keys)
        each = zip(torch.split(logits, 1), asked, keys, strict=True)
        return torch.cat([in_torch.draw(one, [sampling], [key]) for one, sampling, key in each])


def _key(row: Row) -> tuple[int, int]:
    """Of the noise: the seed, and the position of the token to sample."""
    return row.seed, len(row.prompt_token_ids) + len(row.output_token_ids) + len(row.draft_token_ids)


def _wishes(rows: Sequence[Row]) -> bytes:
    """As Library.draw reads them; the rows have their notes."""
    wishes = []
    for row in rows:
        assert isinstance(row.state, _Notes)
        wishes += [race.start(*_key(row)) if row.sampling.temperature else NO_NOISE, row.state.wish]
    return b"".join(wishes)


def _drawn(
    kernels: Library,
    logits: Tensor,
    maxima: Tensor,
    wishes: bytes,
    num_tries: int,
    some: Sequence[int] | None,
    masks: Masks | None,
) -> list[list[int]]:
    if masks is None:
        return kernels.draw(logits, maxima, wishes, num_tries, some)
    own = range(len(logits)) if some is None else some
    addresses = masks.addresses(own) if masks.rows else ()
    num_words = len(masks.bits[0].words) if masks.rows else 0
    # Those that a check has come upon need not be asked about.
    forced = [masks.forced.get(row, NOT_FORCED) for row in own] if masks.forced and some is None else ()
    return kernels.draw(logits, maxima, wishes, num_tries, some, addresses, num_words, forced)


def _sampled(ranked: list[list[int]]) -> Sampled:
    """The first of each row."""
    return Sampled([tokens[0] for tokens in ranked], [None] * len(ranked))


def _ranked(logits: Tensor, num: int, by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As Library.rank, by torch."""
    parts = torch.split(logits, 1) if by_row else (logits,)
    totals = torch.cat([part.logsumexp(-1) for part in parts])
    values, ids = Tiles(logits).likeliest(num) if num else (logits[:, :0], logits.new_empty(0))
    return totals, values, ids


@dataclass(slots=True)
class _Logprobs:
    """Log-probabilities of the rows that ask, on the device."""

    rows: list[int]
    nums: list[int]
    """How many of the likeliest each of them wants."""
    tensors: tuple[Tensor, ...]
    """Of the tokens that were sampled, [m] f32; where anybody wants any, also the ids of the likeliest, the likeliest
    first, and theirs, [m, most of nums]."""

    def fill(self, logprobs: list[TokenLogprob | None], token_ids: list[int], tensors: Sequence[Tensor]) -> None:
        """Of a whole batch, in its order. ``tensors``: as its own, on the host."""
        none: list[list[Any]] = [[]] * len(self.rows)
        own, top_ids, top = (
            [tensor.tolist() for tensor in tensors] if len(tensors) > 1 else [tensors[0].tolist(), none, none]
        )
        for i, (row, num) in enumerate(zip(self.rows, self.nums, strict=True)):
            if token_ids[row] != UNUSABLE:
                logprobs[row] = TokenLogprob(own[i], top_ids[i][:num], top[i][:num])
