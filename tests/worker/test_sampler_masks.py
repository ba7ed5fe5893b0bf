"""What is drawn with masks, with tokens that are forced and with checks behind the draw, whatever else a request asks
for: by the compiled kernels, by torch, and by the slow and obvious way, which lays a mask before it does anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
import torch

from policies.terms import Sampling
from tests.worker import sampling_oracle as oracle
from worker.native import library
from worker.sampler import Row, Sampled, Sampler
from worker.sampling.masks import Bits, Masks
from worker.sampling.wishes import UNUSABLE

EOS = (7, 8)
MAX_TOKENS = 100


@dataclass
class Step:
    """A batch. What is allowed: of each row the tokens that may come, or all."""

    logits: torch.Tensor
    rows: list[Row]
    allowed: list[np.ndarray | None]
    tried: set[int] = field(default_factory=set)
    """Rows that are drawn without their masks at first."""
    ranked: set[int] = field(default_factory=set)
    """Of those, the ones whose next tokens are asked for before their mask is."""
    ending: frozenset[int] = frozenset()
    forced: dict[int, int] = field(default_factory=dict)

    def masks(self) -> Masks | None:
        laid = [row for row in range(len(self.rows)) if self.allowed[row] is not None]
        now = [row for row in laid if row not in self.tried and row not in self.forced]
        if not (now or self.tried or self.forced):
            return None
        check = Check(self) if self.tried else None
        return Masks(now, [self.bits(row) for row in now], check, self.ending, self.forced)

    def bits(self, row: int) -> Bits:
        allowed = self.allowed[row]
        assert allowed is not None
        words = np.full(-(-len(allowed) // 32) + len(allowed) % 2, -1, dtype=np.int32)
        packed = np.packbits(allowed, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return Bits(words, words.ctypes.data)


class Check:
    """As who keeps to a grammar looks at what was drawn without its mask."""

    def __init__(self, step: Step) -> None:
        self._step, self._left, self._ranked = step, set(step.tried), set(step.ranked)
        self.kept: list[Bits] = []

    def refused(self, ranked: Sequence[list[int]]) -> Masks | None:
        wrong, more = [], []
        for row in sorted(self._left):
            allowed, tokens = self._step.allowed[row], ranked[row]
            assert allowed is not None
            fitting = [token_id for token_id in tokens if token_id >= 0 and allowed[token_id]]
            if tokens[0] == UNUSABLE or fitting:
                tokens[:1] = fitting[:1] or [UNUSABLE]
                self._left.discard(row)
            elif row in self._ranked:
                self._ranked.discard(row)
                more.append(row)
            else:
                wrong.append(row)
                self._left.discard(row)
        if not (wrong or more):
            return None
        self.kept = [self._step.bits(row) for row in wrong]
        return Masks(wrong, self.kept, self if self._left else None, more=more)


def a_wish(chance: random.Random) -> dict[str, object]:
    """Of a request: each of its parameters is as often left alone."""
    asked: dict[str, object] = {"temperature": chance.choice([0.0, 0.0, 1e-3, 0.3, 1.0, 1.0, 1.0, 2.0])}
    choices: dict[str, list[object]] = {
        "top_k": [1, 2, 5, 40, 10_000],
        "top_p": [0.01, 0.5, 0.9, 0.999],
        "min_p": [0.01, 0.3, 1.0],
        "presence_penalty": [-2.0, 0.7, 2.0],
        "frequency_penalty": [-1.0, 0.4],
        "repetition_penalty": [0.6, 1.8],
        "logit_bias": [{3: 100.0}, {5: -100.0, 9: 3.0}, {100_000: 5.0, 20: 2.0}],
        "min_tokens": [3, 50],
        "stop_token_ids": [(5,), (1, 20)],
        "ignore_eos": [True],
        "num_logprobs": [0, 1, 5],
    }
    num = chance.choice([0, 0, 1, 1, 2, 4])
    return asked | {name: chance.choice(choices[name]) for name in chance.sample(sorted(choices), num)}


def a_step(chance: random.Random, vocab_size: int) -> Step:
    num = chance.choice([1, 2, 3, 8, 20])
    generator = torch.Generator().manual_seed(chance.getrandbits(30))
    scale = chance.choice([0.0, 0.01, 1.0, 8.0])
    step = Step(scale * torch.randn((num, vocab_size), generator=generator), [], [])
    for row in range(num):
        some = [chance.randrange(min(vocab_size, 30)) for _ in range(chance.randrange(12))]
        sampling = Sampling(**{"max_tokens": MAX_TOKENS, **a_wish(chance)})
        drafted = chance.choice([0, 0, 0, 1, 3])
        step.rows.append(Row(sampling, chance.getrandbits(64), some[:4], some[4:], None, some[:drafted]))
        share = chance.choice([None, 0.0, 0.003, 0.3, 0.97])
        if chance.random() < 0.05:
            step.logits[row, chance.randrange(vocab_size)] = chance.choice([torch.nan, torch.inf, -torch.inf])
        if share is None:
            step.allowed.append(None)
            continue
        allowed = torch.rand(vocab_size, generator=generator).numpy() < share
        if chance.random() < 0.8:
            allowed[chance.randrange(vocab_size)] = True
        step.allowed.append(allowed)
        if is_free(sampling) and chance.random() < 0.5:
            step.tried.add(row)
            if chance.random() < 0.5:
                step.ranked.add(row)
        elif chance.random() < 0.2:
            step.forced[row] = chance.randrange(vocab_size)
        elif chance.random() < 0.2:
            step.ending |= {row}
    return step


def is_free(sampling: Sampling) -> bool:
    """What may come has no say in which of it does."""
    return sampling.top_p == 1.0 and not (sampling.top_k or sampling.min_p)


def expected(step: Step, at: int) -> int:
    row, x = step.rows[at], step.logits[at].double().numpy().copy()
    if not np.all(x < np.inf):
        return UNUSABLE
    if at in step.forced:
        return step.forced[at]
    allowed = step.allowed[at]
    if allowed is not None:
        x[~allowed] = -np.inf
    sampling = row.sampling
    if at in step.ending:
        asked = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        sampling = Sampling(MAX_TOKENS, **asked)
    bias = {token_id: each for token_id, each in sampling.logit_bias.items() if token_id < len(x)}
    said = [*row.output_token_ids, *row.draft_token_ids]
    row = replace(row, sampling=msgspec.structs.replace(sampling, logit_bias=bias), output_token_ids=said)
    unfiltered = msgspec.structs.replace(row.sampling, top_k=0, top_p=1.0, min_p=0.0)
    if not np.isfinite(oracle.processed(x, replace(row, sampling=unfiltered), EOS).max()):
        return UNUSABLE
    return oracle.token(x, row, EOS)


def check_logprobs(step: Step, sampled: Sampled) -> None:
    """They are of the model's own distribution, whatever was masked."""
    for at, row in enumerate(step.rows):
        told, num = sampled.logprobs[at], row.sampling.num_logprobs
        assert (told is None) == (num is None or sampled.token_ids[at] == UNUSABLE)
        if told is None:
            continue
        own = torch.log_softmax(step.logits[at].double(), -1)
        assert told.logprob == pytest.approx(own[sampled.token_ids[at]].item(), abs=1e-4)
        assert len(told.top_token_ids) == min(num or 0, len(own))
        assert told.top_logprobs == pytest.approx(own[told.top_token_ids].tolist(), abs=1e-4)
        assert told.top_logprobs == pytest.approx(own.topk(len(told.top_token_ids)).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_masks_checks_and_forced_tokens_lead_to_the_same_token_by_every_way(seed):
    chance = random.Random(seed)
    vocab_sizes = [30, 64, 97, 1000, 4160]
    samplers = {size: [Sampler(size, EOS, is_compiled) for is_compiled in (True, False)] for size in vocab_sizes}
    for number in range(40):
        size = chance.choice(vocab_sizes)
        step = a_step(chance, size)
        wanted = [expected(step, at) for at in range(len(step.rows))]
        kernels = library()
        for is_known, sampler in ((False, samplers[size][0]), (True, samplers[size][0]), (False, samplers[size][1])):
            logits, rows = step.logits.clone(), [replace(row) for row in step.rows]
            maxima = kernels.maxima(logits) if is_known and kernels is not None else None
            sampled = sampler.sample(logits, rows, maxima, step.masks())
            assert sampled.token_ids == wanted, (seed, number, is_known)
            check_logprobs(step, sampled)
