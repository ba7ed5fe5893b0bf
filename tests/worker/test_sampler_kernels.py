"""What the compiled kernels make of logits beside the draw: the likeliest tokens, and penalties; as torch does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.worker.compiling import kernels, random
from tests.worker.sampling_oracle import row
from worker.native import MAX_TRIES
from worker.sampler import Row, Sampler
from worker.sampling.adjust import Adjustments, Counts, adjust
from worker.sampling.tiles import Tiles

VOCAB_SIZES = [1, 2, 63, 64, 65, 300, 1000, 20_000]


def hostile(vocab_size: int, seed: int) -> torch.Tensor:
    """Rows of logits: plain, of few values, flat, far apart, with tokens at minus infinity, all but one there; and two
    that are no distribution."""
    x = random(seed, 9, vocab_size) * 3
    x[1] = x[1].round()
    x[2] = 0.0
    x[3] *= 1e4
    x[4, random(seed + 1, vocab_size) > 0.3] = -math.inf
    x[5] = -math.inf
    x[4:6, vocab_size // 2] = -3.0
    x[6] = torch.where(x[6] > 0, 0.0, -0.0)
    x[7, vocab_size - 1] = math.nan
    x[8, 0] = math.inf
    return x


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_likeliest_tokens_are_torchs_in_its_order_and_totals_as_exact_as_float32_says(vocab_size):
    library = kernels()
    x = hostile(vocab_size, vocab_size)
    maxima = library.maxima(x)
    usable = x[:7]
    for num in {0, 1, min(20, vocab_size), min(MAX_TRIES, vocab_size)}:
        totals, values, tokens = library.rank(x, maxima, num)
        assert torch.allclose(totals[:7].double(), usable.double().logsumexp(-1), rtol=1.2e-7, atol=1e-6)
        assert totals[7:].isnan().all()
        if num:
            expected = Tiles(usable).likeliest(num)
            assert torch.equal(values[:7], expected[0])
            assert torch.equal(tokens[:7], expected[1])
        some = library.rank(x, maxima, num, [5, 0, 3])
        assert all(torch.equal(own, each[[5, 0, 3]]) for own, each in zip(some, (totals, values, tokens), strict=True))


@pytest.mark.parametrize("num", [0, 3, 20, MAX_TRIES, MAX_TRIES + 1])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.4, "logit_bias": {3: 100.0}}], ids=["plain", "adjusted"])
def test_logprobs_by_the_kernels_are_those_by_torch(num, more):
    x = hostile(1000, 4)
    rows = [row(seed=seed, num_logprobs=num if seed % 2 else None, **more) for seed in range(len(x))]
    ours, theirs = (
        Sampler(1000, (), is_compiled=is_compiled).sample(x.clone(), rows).logprobs for is_compiled in (True, False)
    )
    for own, other in zip(ours, theirs, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert own.top_token_ids == other.top_token_ids
            assert own.logprob == pytest.approx(other.logprob, abs=4e-6, rel=2.4e-7)
            assert own.top_logprobs == pytest.approx(other.top_logprobs, abs=4e-6, rel=2.4e-7)


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.3, "frequency_penalty": -0.7},
    {"presence_penalty": 1.3},
    {"repetition_penalty": 1.1, "presence_penalty": -2.0, "frequency_penalty": 0.1},
]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("num_prompt", [0, 5, 30_000])
def test_penalties_by_the_kernels_are_torchs_to_the_bit_and_maxima_stay_right(vocab_size, num_prompt):
    library = kernels()
    generator = np.random.default_rng(vocab_size + num_prompt)
    x = hostile(vocab_size, 2)
    rows = []
    for at in range(len(x)):
        asked = row(prompt=generator.integers(0, vocab_size + 2, num_prompt).tolist(), **PENALTIES[at % len(PENALTIES)])
        adjustments = Adjustments.of(asked.sampling, asked.prompt_token_ids, (), vocab_size)
        assert adjustments is not None
        output, draft = (generator.integers(0, vocab_size, num).tolist() for num in (at * 40, at % 3))
        rows.append((at, adjustments, output, draft))
    ours, theirs, maxima = x.clone(), x.clone(), library.maxima(x)
    assert adjust(ours, rows, library, maxima).numel() == 0
    adjust(theirs, rows)
    assert torch.equal(ours.view(torch.int32), theirs.where(theirs != 0, ours).view(torch.int32))
    assert torch.equal(maxima.nan_to_num(7e7), library.maxima(ours).nan_to_num(7e7))


def test_counts_are_of_each_token_once_wherever_it_was_seen_first():
    generator = np.random.default_rng(5)
    prompt = generator.integers(-3, 210, 60).tolist()
    counts, output = Counts(200, prompt), list[int]()
    twin = counts.twin()
    for _ in range(60):
        output += generator.integers(0, 200, 3).tolist()
        counts.update(output)
        draft = generator.integers(0, 200, 4).tolist()
        for seen in ([], draft):
            ids, nums = counts.with_draft(seen)
            found = dict(zip(ids.tolist(), nums.tolist(), strict=True))
            assert len(found) == len(ids)
            known = {token_id for token_id in prompt if 0 <= token_id < 200} | {*output, *seen}
            assert found == {token_id: [*output, *seen].count(token_id) for token_id in known}
    assert not twin.num_output.any()
    twin.update(output[:9])
    assert dict(zip(twin.token_ids.tolist(), twin.num_output.tolist(), strict=True)).items() >= {
        (token_id, output[:9].count(token_id)) for token_id in output[:9]
    }


def test_a_bias_of_every_token_leaves_maxima_right():
    library = kernels()
    x = random(3, 4, 3000)
    every = {token_id: (-1.0) ** token_id * 100.0 for token_id in range(3000)}
    rows = [Row(row(logit_bias=every).sampling, seed, [1], []) for seed in range(4)]
    expected = Sampler(3000, (), is_compiled=False).sample(x.clone(), rows).token_ids
    maxima = library.maxima(x)
    assert Sampler(3000, ()).sample(x, rows, maxima).token_ids == expected
    assert torch.equal(maxima, library.maxima(x))
