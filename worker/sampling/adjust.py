"""What a request changes about single logits: penalties, logit bias, tokens it does not want or forbids. Rows that ask
for nothing cost nothing.

A row touches the logits of tokens it has seen, not the vocabulary: ids and counts are kept per sequence and grow by a
token a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policies.terms import Sampling
from worker.native import Library, Seen
from worker.transfer import sent

UNWANTED = -1e4
"""Added to the logit of a token that is not wanted: its probability is 0 beside any other, and yet it is there where a
grammar leaves nothing else."""


SMALLEST_REPETITION = 1e-30
"""Smaller penalties would be zero in float32, or make more of a logit than it can hold."""


class Counts:
    """How often one sequence has seen each token, kept up to date from its two lists, and rebuilt from them when
    there is none.

    Bounded by the number of distinct tokens in both.
    """

    def __init__(self, vocab_size: int, prompt_token_ids: Sequence[int]) -> None:
        """``prompt_token_ids``: empty when only the output counts. Ids outside the vocabulary have no logit and are
        left out.
        """
        prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._token_ids, self._num_tokens = self._prompt, len(self._prompt)
        self._num_output = np.zeros(len(self._prompt), dtype=np.float32)
        self._places: dict[int, int] = {}
        """Of tokens of the output; a dictionary of a long prompt's would take a hundred times its memory."""
        self._num_counted = 0

    def twin(self) -> Counts:
        """Of another sequence of the same prompt, before anything of either's output is counted."""
        assert not self._num_counted
        twin = Counts.__new__(Counts)
        twin._prompt = twin._token_ids = self._prompt  # which nobody writes to
        twin._num_output, twin._num_tokens = np.zeros(len(self._prompt), dtype=np.float32), len(self._prompt)
        twin._places, twin._num_counted = {}, 0
        return twin

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens sampled since the last call. The list only ever grows."""
        for token_id in output_token_ids[self._num_counted :]:
            place = self._places.get(token_id)
            if place is None:
                place = self._places[token_id] = self._new_place(token_id)
            self._num_output[place] += 1
        self._num_counted = len(output_token_ids)

    def _new_place(self, token_id: int) -> int:
        place = self._place_in_prompt(token_id)
        if place is None:
            place = self._num_tokens
            if place == len(self._token_ids):
                self._grow()
            self._token_ids[place] = token_id
            self._num_tokens += 1
        return place

    def _place_in_prompt(self, token_id: int) -> int | None:
        place = int(self._prompt.searchsorted(token_id))
        return place if place < len(self._prompt) and self._prompt[place] == token_id else None

    def _grow(self) -> None:
        room = max(64, len(self._token_ids))
        self._token_ids = np.concatenate([self._token_ids, np.zeros(room, dtype=np.int64)])
        self._num_output = np.concatenate([self._num_output, np.zeros(room, dtype=np.float32)])

    def with_draft(self, draft_token_ids: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """``token_ids`` and ``num_output`` as they would be after these, which are not counted."""
        if not draft_token_ids:
            return self.token_ids, self.num_output
        new: dict[int, int] = {}
        at = []
        for token_id in draft_token_ids:
            place = self._places.get(token_id)
            if place is None and (place := self._place_in_prompt(token_id)) is None:
                place = new.setdefault(token_id, self._num_tokens + len(new))
            at.append(place)
        num_new = len(new)
        token_ids = np.concatenate([self.token_ids, np.zeros(num_new, dtype=np.int64)])
        num_output = np.concatenate([self.num_output, np.zeros(num_new, dtype=np.float32)])
        token_ids[at] = draft_token_ids
        np.add.at(num_output, at, 1)
        return token_ids, num_output

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Each token once."""
        return self._token_ids[: self._num_tokens]

    @property
    def num_output(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output of each of ``token_ids``; 0: in the prompt alone."""
        return self._num_output[: self._num_tokens]


@dataclass(slots=True)
class Adjustments:
    """What one sequence does to its logits, worked out once; ``of`` is None for those that do nothing."""

    sampling: Sampling
    counts: Counts | None
    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    allowed_ids: npt.NDArray[np.int64]
    """No others are wanted; none: all are."""
    stop_ids: npt.NDArray[np.int64]
    """Forbidden before ``min_tokens``."""
    endings: Mapping[int, Sequence[tuple[int, ...]]]
    """Bad words of several tokens, by the last token but one."""

    @classmethod
    def of(
        cls, sampling: Sampling, prompt_token_ids: Sequence[int], eos_token_ids: Sequence[int], vocab_size: int
    ) -> Adjustments | None:
        penalised = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        stop_ids = [i for i in sorted(stops) if 0 <= i < vocab_size] if sampling.min_tokens else []
        biases = {i: bias for i, bias in sampling.logit_bias.items() if 0 <= i < vocab_size}
        for i in {word[0] for word in sampling.bad_words if len(word) == 1 and 0 <= word[0] < vocab_size}:
            biases[i] = biases.get(i, 0.0) + UNWANTED
        allowed_ids = sorted({i for i in sampling.allowed_token_ids if 0 <= i < vocab_size})
        endings: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling.bad_words:
            if len(word) > 1 and 0 <= word[-1] < vocab_size:
                endings.setdefault(word[-2], []).append(word)
        if not (penalised or stop_ids or biases or allowed_ids or endings):
            return None
        return cls(
            sampling=sampling,
            counts=Counts(vocab_size, prompt_token_ids if sampling.repetition_penalty != 1.0 else ())
            if penalised
            else None,
            bias_ids=np.fromiter(biases, dtype=np.int64),
            biases=np.fromiter(biases.values(), dtype=np.float32),
            allowed_ids=np.array(allowed_ids, dtype=np.int64),
            stop_ids=np.array(stop_ids, dtype=np.int64),
            endings=endings,
        )

    def twin(self) -> Adjustments:
        """Of another sequence that asks for the same behind the same prompt, see Counts."""
        return replace(self, counts=None if self.counts is None else self.counts.twin())

    def completing(self, output: Sequence[int], draft: Sequence[int]) -> set[int]:
        """Tokens that would complete a bad word behind these."""
        last = draft[-1] if draft else output[-1] if output else None
        words = self.endings.get(last, ()) if last is not None else ()
        return {word[-1] for word in words if _end_with(word[:-1], output, draft)}


def _end_with(token_ids: tuple[int, ...], output: Sequence[int], draft: Sequence[int]) -> bool:
    num = len(token_ids)
    behind = tuple(draft[-num:])
    before = num - len(behind)
    return len(output) >= before and tuple(output[len(output) - before :]) + behind == token_ids


Adjusted = tuple[int, Adjustments, Sequence[int], Sequence[int]]
"""A row of logits, what it does, its output so far, and the draft that it takes for granted."""


def adjust(
    logits: Tensor, rows: Sequence[Adjusted], kernels: Library | None = None, maxima: Tensor | None = None
) -> Tensor | None:
    """In place: penalties, then bias and tokens that are not wanted, then forbidden ones. Penalties by ``kernels``,
    which leave the ``maxima`` (see Library.maxima) of their rows right, where there are any.

    -> [count] i64: which others have changed, of all rows end to end, some more than once; None: whole rows.
    """
    flat = logits.view(-1)
    changed: list[Tensor] = []
    vocab_size = logits.shape[1]
    penalised: list[_Penalised] = []
    for at, adjustments, output, draft in rows:
        if adjustments.counts is not None:
            adjustments.counts.update(output)
            token_ids, counts = adjustments.counts.with_draft(draft)
            if len(token_ids):
                penalised.append((at, token_ids, counts, adjustments.sampling))
    if penalised and kernels is not None:
        kernels.penalise(logits, map(_seen, penalised), maxima)
    elif penalised:
        changed.append(_penalise(logits, penalised))

    biased = [(at * vocab_size, a) for at, a, _, _ in rows if len(a.bias_ids)]
    if biased:
        where = _on(logits, np.concatenate([start + a.bias_ids for start, a in biased]))
        changed.append(where)
        flat[where] += _on(logits, np.concatenate([a.biases for _, a in biased]))

    are_whole = False
    for at, a, _, _ in rows:
        if len(a.allowed_ids):
            own, wanted = logits[at], _on(logits, a.allowed_ids)
            kept = own[wanted]
            own += UNWANTED
            own[wanted] = kept
            are_whole = True

    completed = [
        at * vocab_size + token_id
        for at, a, output, draft in rows
        if a.endings
        for token_id in a.completing(output, draft)
    ]
    if completed:
        where = _on(logits, np.array(completed, dtype=np.int64))
        changed.append(where)
        flat[where] += UNWANTED

    early = [(at * vocab_size, a) for at, a, output, draft in rows if len(output) + len(draft) < a.sampling.min_tokens]
    if early:
        where = _on(logits, np.concatenate([start + a.stop_ids for start, a in early]))
        changed.append(where)
        # NaN and +inf stay: such a row is not usable, and hiding one of its tokens does not make it so.
        forbidden = flat[where]
        flat[where] = forbidden.masked_fill(forbidden < torch.inf, -torch.inf)
    if are_whole:
        return None
    return torch.cat(changed) if changed else torch.empty(0, dtype=torch.int64, device=logits.device)


_Penalised = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32], Sampling]
"""A row of logits, the tokens that it has seen, how often each is in its output, and the penalties for that."""


def _seen(penalised: _Penalised) -> Seen:
    at, token_ids, counts, sampling = penalised
    return Seen(at, len(token_ids), token_ids.ctypes.data, counts.ctypes.data, *_penalties(sampling))


def _penalties(sampling: Sampling) -> tuple[float, float, float]:
    """For repetition, presence and frequency."""
    repetition = max(sampling.repetition_penalty, SMALLEST_REPETITION)
    return repetition, sampling.presence_penalty, sampling.frequency_penalty


def _penalise(logits: Tensor, penalised: Sequence[_Penalised]) -> Tensor:
    """By torch -> [count] i64: which have changed."""
    flat, vocab_size = logits.view(-1), logits.shape[1]
    lengths = [len(token_ids) for _, token_ids, _, _ in penalised]
    where = _on(logits, np.concatenate([at * vocab_size + token_ids for at, token_ids, _, _ in penalised]))
    num_output = _on(logits, np.concatenate([counts for _, _, counts, _ in penalised]))
    terms = [_penalties(sampling) for _, _, _, sampling in penalised]
    repetition, presence, frequency = _on(logits, np.repeat(np.array(terms, dtype=np.float32).T, lengths, axis=1))
    seen = flat[where]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    flat[where] = seen - frequency * num_output - presence * (num_output > 0)
    return where


def _on(logits: Tensor, values: npt.NDArray[np.generic]) -> Tensor:
    return sent(values, logits.device)
