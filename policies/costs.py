"""What a step costs, learned while running, and how many prompt tokens fit beside the answers being written.

Step time is taken as linear in the amounts of work, as in SLOs-Serve (arXiv 2504.08784) and Sarathi-Serve (OSDI '24):

    t = a + b * prompt tokens + c * decoding sequences + d * KV tokens they read + e * (prompt, earlier) token pairs
          + f * chunks + g * KV tokens before the chunks + h * draft tokens

Chunks and what is before them are most of what a short chunk costs: its past is read, and on some devices repacked,
once for the chunk, however short it is. A decoding sequence with a draft to verify is no chunk: its past is read with
its own token, and each draft token is one row more.

The weights are those of least relative error over the steps seen, with forgetting, so they follow a machine that slows
down or a batch that changes shape. None is below zero: more work never takes less time. Steps with prompts,
with drafts and with neither are remembered apart, since hours of the one kind say little about the others. What is
read of the past (d, e, g) is held at what it last was when steps with much of a past spoke for it, zero at first (ridge
regression, Hoerl and Kennard 1970): of short ones a slow moment looks like it, and then a long prompt seems to take
several times what it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from operator import mul, truediv
from typing import NamedTuple

Weights = tuple[float, ...]
"""Seconds for one unit of each term of the formula above, in its order, none below zero; empty: nothing is known."""


class Work(NamedTuple):
    """One step's work, in the units of the formula above."""

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_decode_context_tokens: int = 0
    num_prefill_pairs: int = 0
    """Sum over the chunks of (length * start + length * (length + 1) / 2)."""
    num_chunks: int = 0
    num_chunk_context_tokens: int = 0
    """Sum of the chunks' starts."""
    num_draft_tokens: int = 0
    """Verified beside the tokens of the decoding sequences."""


class ChunkPrice(NamedTuple):
    """What a chunk of a prompt adds to a step."""

    token_s: float
    """Seconds a token, whatever stands before it."""
    pair_s: float
    """Seconds for each earlier token that it attends to."""
    chunk_s: float = 0.0
    """Seconds for there being a chunk."""
    context_s: float = 0.0
    """Seconds for each token before the chunk."""

    def seconds(self, num_tokens: int, start: int) -> float:
        """Added by ``num_tokens`` prompt tokens, the first at position ``start``."""
        return self._fixed_s(start) + self.token_s * num_tokens + self.pair_s * pairs(num_tokens, start)

    def tokens_within(self, budget_s: float, start: int) -> int:
        """The longest chunk from ``start`` that adds at most ``budget_s``; 2**31 while nothing is known to cost."""
        budget_s -= self._fixed_s(start)
        if budget_s <= 0:
            return 0
        linear = self.token_s + self.pair_s * (start + 0.5)
        if linear < 1e-15:
            return 1 << 31
        # pair_s / 2 * n**2 + linear * n = budget_s, in the form that does not cancel for small pair_s
        return min(1 << 31, int(2 * budget_s / (linear + math.sqrt(linear * linear + 2 * self.pair_s * budget_s))))

    def _fixed_s(self, start: int) -> float:
        return self.chunk_s + self.context_s * start


def pairs(num_tokens: int, start: int) -> int:
    """(token, token at or before it) pairs of a chunk."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def predicted(weights: Weights, work: Work) -> float:
    """Seconds for a step of this work, by the weights that a worker told of."""
    return sum([weight * amount for weight, amount in zip(weights, (1.0, *work), strict=False)])


class Shares(NamedTuple):
    """How the seconds of one step fall to the sequences that were in it; those of all add up to the step."""

    decode_s: float
    """For one token."""
    context_s: float
    """Beside that, for each token up to and with it."""
    chunk: ChunkPrice
    """For a chunk of a prompt."""
    draft_s: float = 0.0
    """For each draft token."""


_BY_TOKENS = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Weights that know nothing but that all tokens are equal."""


def shares(weights: Weights, work: Work, seconds: float) -> Shares:
    """Of a step of this work that took so long: to each by what its part should cost, to all alike what comes with any
    step; by tokens while the weights are not known, or say that such a step costs nothing. There must be work."""
    step, token, decode, context, pair, chunk, chunk_context, draft = weights or _BY_TOKENS
    num_decodes, num_chunks = work.num_decodes, work.num_chunks
    whole = step + decode * num_decodes + context * work.num_decode_context_tokens + draft * work.num_draft_tokens
    if num_chunks:
        whole += token * work.num_prefill_tokens + pair * work.num_prefill_pairs
        whole += chunk * num_chunks + chunk_context * work.num_chunk_context_tokens
    if whole <= 0.0:
        return shares(_BY_TOKENS, work, seconds)
    scale = seconds / whole
    each = step / (num_decodes + num_chunks)
    price = ChunkPrice(scale * token, scale * pair, scale * (chunk + each), scale * chunk_context)
    return Shares(scale * (decode + each), scale * context, price, scale * draft)


_UNITS = (1.0, 256.0, 8.0, 4096.0, 256.0 * 1024.0, 1.0, 1024.0, 8.0)
"""Typical amounts; dividing by them keeps the fit well conditioned."""
_NUM = len(_UNITS)
_FORGET = 0.99
_LEAST_S = 1e-9
"""What a clock tells apart, and no step takes; squares of far less are nought."""
_INERTIA = 1e-4
"""Of a weight, in squared amounts: what no step that is remembered speaks of stays as it was."""
_HELD = 0.05
"""What it costs the fit that a term of the past is off from where it is held, by as much a unit as a step and a unit of
tokens take: as much as one step that is off by the root of this."""
_SURE = 20.0
"""Times as much as that steps say of it before it is held where they have it."""
_REFERENCES = (0, 0, 0, 2, 1, 0, 1, 0)
"""Of each term, that whose unit it is measured by, beside the step itself; 0: it is not held."""
_NUM_SWEEPS = 4
"""Of the fit after a step, which begins where the last one ended."""
_NUM_SETTLING = 400
"""Of a whole fit, which takes some milliseconds."""
_NUM_FITTED_EACH = 64
"""First steps, after each of which there is a fit."""
_FIT_EVERY = 4
"""Later steps: a fit takes as long as a twentieth of a small model's step."""
_MIN_OBSERVED = 8
"""Steps after which a prediction is better than none."""
_SURPRISE = 4.0
"""A step this many times its prediction (a page fault storm, a neighbour on the core) teaches only as much as this."""
_HASTE = 2.0
"""A step that took less than its prediction divided by ``_SURPRISE`` teaches as much as one that took it divided by
this, unless the last one of its kind was such, too: it was done while the host stood still, and is read with the one
before. Of relative errors those of short steps weigh most."""


class StepCosts:
    """The fitted formula. Feed it every step; ask it any time."""

    def __init__(self) -> None:
        self._weights = [0.0] * _NUM
        self._held = [0.0] * _NUM
        """Where the terms of the past are held."""
        self._memories = [_Memory((0, 2, 3)), _Memory(range(_NUM)), _Memory((0, 2, 3, 7))]
        """Of steps of single tokens, of steps with prompts, and of those with drafts, each of the terms that such steps
        have."""
        self._num_observed = 0
        self._latest: list[tuple[Work, float]] = []
        """Steps, and what they took, that the next fit is told of: all at once is sooner done."""

    @classmethod
    def of(cls, weights: Weights) -> StepCosts:
        """As if it had learned these, in the units of ``weights``; the last ones may be left out, and are 0."""
        costs = cls()
        costs._weights = [weight * unit for weight, unit in zip_longest(weights, _UNITS, fillvalue=0.0)]
        costs._held = list(costs._weights)
        costs._num_observed = _MIN_OBSERVED
        return costs

    @property
    def known(self) -> bool:
        """Enough steps were seen that a prediction is better than none."""
        return self._num_observed >= _MIN_OBSERVED

    def observe(self, work: Work, seconds: float) -> None:
        """One step of this work took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._latest.append((work, max(seconds, _LEAST_S)))
        num_observed = self._num_observed + len(self._latest)
        if num_observed < _NUM_FITTED_EACH or not num_observed % _FIT_EVERY:
            self._fit(_NUM_SWEEPS)

    def _remember(self, work: Work, seconds: float) -> None:
        amounts = _amounts(work)
        predicted = sum(map(mul, self._weights, amounts))
        kind = 1 if work.num_prefill_tokens else 2 if work.num_draft_tokens else 0
        memory = self._memories[kind]
        if self.known and predicted > 0:
            was_short, memory.was_short = memory.was_short, seconds * _SURPRISE < predicted
            least_s = predicted / _HASTE if memory.was_short and not was_short else seconds
            seconds = min(max(seconds, least_s), predicted * _SURPRISE)
        memory.add([amounts[term] / seconds for term in memory.terms])
        self._num_observed += 1

    def _fit(self, num_sweeps: int) -> None:
        """Least squares by coordinate descent, which makes staying above zero a matter of stopping there."""
        for each in self._latest:
            self._remember(*each)
        self._latest.clear()
        weights, held = self._weights, self._held
        single, prompts, drafts = self._memories
        products, sums = [list(row) for row in prompts.products], list(prompts.sums)
        for memory in (single, drafts):
            for term, row, value in zip(memory.terms, memory.products, memory.sums, strict=True):
                sums[term] += value
                for other, product in zip(memory.terms, row, strict=True):
                    products[term][other] += product
        for _ in range(num_sweeps):
            for i, row in enumerate(products):
                scale_s = weights[0] + weights[_REFERENCES[i]] if _REFERENCES[i] else 0.0
                ridge = _HELD / max(scale_s, _LEAST_S) ** 2 if scale_s else 0.0
                pull = sums[i] - sum(map(mul, row, weights)) + ridge * (held[i] - weights[i])
                weights[i] = max(0.0, weights[i] + pull / (row[i] + _INERTIA + ridge))
        for i, reference in enumerate(_REFERENCES):
            if reference and products[i][i] * (weights[0] + weights[reference]) ** 2 > _SURE * _HELD:
                held[i] = weights[i]

    def settle(self) -> None:
        """What is to be learned of the steps so far is learned: after each there is only the beginning of a fit."""
        self._fit(_NUM_SETTLING)

    def predict(self, work: Work) -> float:
        """Seconds for a step of this work."""
        return float(sum(map(mul, self._weights, _amounts(work))))

    @property
    def weights(self) -> Weights:
        """For those who were not there; empty until they are known."""
        if not self.known:
            return ()
        return tuple(map(truediv, self._weights, _UNITS))

    @property
    def chunk_price(self) -> ChunkPrice:
        """What prompt tokens add to a step."""
        weights = [weight / unit for weight, unit in zip(self._weights, _UNITS, strict=True)]
        return ChunkPrice(token_s=weights[1], pair_s=weights[4], chunk_s=weights[5], context_s=weights[6])


class _Memory:
    """Steps of one kind, the latest ones most, each as its amounts over its seconds: what the weights should make 1."""

    def __init__(self, terms: Sequence[int]) -> None:
        self.terms = terms
        self.products = [[0.0] * len(terms) for _ in terms]
        self.sums = [0.0] * len(terms)
        self.was_short = False
        """The last one took far less than was predicted."""

    def add(self, x: list[float]) -> None:
        self.products = [
            [_FORGET * value + xi * xj for value, xj in zip(row, x, strict=True)]
            for row, xi in zip(self.products, x, strict=True)
        ]
        self.sums = [_FORGET * value + xi for value, xi in zip(self.sums, x, strict=True)]


def _amounts(work: Work) -> tuple[float, ...]:
    return (
        1.0,
        work.num_prefill_tokens / _UNITS[1],
        work.num_decodes / _UNITS[2],
        work.num_decode_context_tokens / _UNITS[3],
        work.num_prefill_pairs / _UNITS[4],
        work.num_chunks / _UNITS[5],
        work.num_chunk_context_tokens / _UNITS[6],
        work.num_draft_tokens / _UNITS[7],
    )
