"""The sampler against slow, obvious arithmetic, against transformers' processors, and against itself in any company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.terms import Sampling
from tests.worker import sampling_oracle as oracle
from tests.worker.sampling_oracle import row
from worker.native import MAX_TRIES, library
from worker.sampler import Row, Sampler
from worker.sampling import race
from worker.sampling.masks import Bits, Masks
from worker.sampling.wishes import UNUSABLE, wish_of

VOCAB_SIZE = 300
"""Not a multiple of the tile's width."""
EOS = (7, 8)


def logits(num_rows: int = 1, vocab_size: int = VOCAB_SIZE, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample(x: torch.Tensor, rows: list[Row]) -> list[int]:
    """By the compiled kernels, where there are any, and by torch: it is the same. Leaves ``x`` as it is."""
    compiled = Sampler(x.shape[1], EOS).sample(x.clone(), rows).token_ids
    assert Sampler(x.shape[1], EOS, is_compiled=False).sample(x.clone(), rows).token_ids == compiled
    return compiled


FEATURES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 10_000, "top_p": 0.5},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.05, "temperature": 2.0},
    "min_p": {"min_p": 0.1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": {3: 4.0, 200: 5.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": (5,), "logit_bias": {5: 6.0, 7: 6.0}},
    "allowed_token_ids": {"allowed_token_ids": (3, 4, 9, 299), "logit_bias": {4: 2.0, 100: 100.0}},
    "bad_words": {"bad_words": ((3,), (9, 200, 4, 150), (4, 4), (9, 4, 151), (5, 4, 4, 9, 200, 4, 12))},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "everything": {
        "temperature": 1.3,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 2.0, 250: 3.0},
        "min_tokens": 10,
    },
}
OUTPUT = [4, 4, 9, 200, 4]

features = pytest.mark.parametrize("sampling", FEATURES.values(), ids=FEATURES)


@features
def test_sampled_frequencies_match_the_target_distribution(sampling):
    x, num, num_compared = logits(seed=1), 20_000, 2_000
    rows = [row(seed=seed, output=OUTPUT, **sampling) for seed in range(num)]
    sampled = Sampler(VOCAB_SIZE, EOS).sample(x.repeat(num, 1), rows).token_ids
    assert sample(x.expand(num_compared, -1), rows[:num_compared]) == sampled[:num_compared]
    target = oracle.probabilities(oracle.processed(x[0].numpy(), row(output=OUTPUT, **sampling), EOS))
    counts = np.bincount(sampled, minlength=VOCAB_SIZE)
    assert counts[target == 0].sum() == 0
    assert chi_square_z(counts[target > 0], target[target > 0]) < 4.5


def chi_square_z(counts: np.ndarray, target: np.ndarray) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty 1931); rare outcomes count as one."""
    expected = target * counts.sum()
    order = np.argsort(expected)
    rare = order[np.cumsum(expected[order]) < 5]
    common = np.setdiff1d(order, rare)
    counts = np.append(counts[common], counts[rare].sum())
    expected = np.append(expected[common], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    if freedom == 0:
        return 0.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@features
@pytest.mark.parametrize("vocab_size", [300, 4096])
def test_each_draw_is_the_one_of_the_whole_vocabulary_and_the_same_noise(sampling, vocab_size):
    x = logits(200, vocab_size, seed=2)
    rows = [row(seed=seed, prompt=range(seed % 50), output=OUTPUT, **sampling) for seed in range(200)]
    expected = [oracle.token(x[i].numpy(), r, EOS) for i, r in enumerate(rows)]
    assert sample(x, rows) == expected


@pytest.mark.parametrize("vocab_size", [10, 64, 65, 1000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 30.0])
def test_draws_are_right_for_flat_and_steep_logits_and_any_vocabulary(vocab_size, scale):
    x = logits(50, vocab_size, scale=scale, seed=3)
    for sampling in ({}, {"top_p": 0.3}, {"top_k": 3}, {"min_p": 0.5}):
        rows = [row(seed=seed, prompt=(), **sampling) for seed in range(50)]
        assert sample(x, rows) == [oracle.token(x[i].numpy(), r) for i, r in enumerate(rows)]


@pytest.mark.parametrize("vocab_size", [10, 300, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_tokens_behind_a_drawn_one_are_those_that_would_have_come_without_it(vocab_size, temperature):
    kernels = library()
    if kernels is None:
        pytest.skip("no compiled kernels")
    x = logits(8, vocab_size, scale=1.0, seed=9)
    wishes = b"".join(race.start(seed, 5) + wish_of(Sampling(1, temperature=temperature)) for seed in range(8))
    ranked = torch.tensor(kernels.draw(x, kernels.maxima(x), wishes, MAX_TRIES))
    for tokens in ranked.T:
        assert kernels.draw(x, kernels.maxima(x), wishes) == tokens[:, None].tolist()
        x[torch.arange(8), tokens] = -torch.inf


def test_the_processed_distribution_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    prompt, output = [1, 2, 3, 3, 250], [40, 3, 41, 40]
    sampling = {
        "repetition_penalty": 1.3,
        "min_tokens": 6,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
    }
    chain = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.MinNewTokensLengthLogitsProcessor(len(prompt), 6, list(EOS), device="cpu"),
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(50),
            transformers.TopPLogitsWarper(0.9),
            transformers.MinPLogitsWarper(0.01),
        ]
    )
    x = logits(200, seed=4)
    rows = [row(seed=seed, prompt=prompt, output=output, **sampling) for seed in range(200)]
    scores = chain(torch.tensor([prompt + output] * 200), x.clone()).double().numpy()
    expected = [int((scores[i] + oracle.noise(i, len(prompt + output), VOCAB_SIZE)).argmax()) for i in range(200)]
    assert sample(x, rows) == expected


samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-5, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 70, 500]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.3]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=3
        ),
        "min_tokens": st.integers(0, 5),
        "num_logprobs": st.sampled_from([None, 0, 3, 20]),
    },
)
rows_strategy = st.builds(
    lambda seed, prompt, output, sampling: row(seed, prompt, output, **sampling),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
    samplings,
)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(rows_strategy, min_size=1, max_size=12), st.integers(0, 1000))
def test_a_row_samples_the_same_alone_in_a_crowd_and_in_any_order(data, rows, seed):
    x = logits(len(rows), seed=seed)
    sampler = Sampler(VOCAB_SIZE, EOS)
    together = sampler.sample(x.clone(), rows)
    for i, r in enumerate(rows):
        alone = sampler.sample(x[i : i + 1].clone(), [Row(r.sampling, r.seed, r.prompt_token_ids, r.output_token_ids)])
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert (alone.logprobs[0] is None) == (together.logprobs[i] is None)
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    again = sampler.sample(x[some].clone(), [rows[i] for i in some])
    assert again.token_ids == [together.token_ids[i] for i in some]


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_of_different_seeds_and_positions_are_independent(by):
    num, vocab_size = 20_000, 8
    if by == "seed":
        rows = [row(seed=i, prompt=()) for i in range(num)]
    else:
        rows = [Row(Sampling(max_tokens=1), 2**64 - 1, range(position), []) for position in range(num)]
    sampled = np.array(sample(torch.zeros(num, vocab_size), rows))
    pairs = np.bincount(sampled[:-1] * vocab_size + sampled[1:], minlength=vocab_size**2)
    assert chi_square_z(pairs, np.full(vocab_size**2, vocab_size**-2)) < 4.5


def test_every_seed_and_position_of_64_bits_has_its_own_draw():
    x = torch.zeros(5, 100_000)
    seeds = [0, 1, 2**63, 2**64 - 2, 2**64 - 1]
    assert len(set(sample(x, [row(seed=seed) for seed in seeds]))) == 5


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals():
    x = torch.zeros(3, VOCAB_SIZE)
    x[0, [299, 130, 131]] = 1.0
    x[1, [64, 63]] = 2.0
    assert sample(x, [row(temperature=0)] * 3) == [130, 63, 0]
    assert sample(x, [row(temperature=0), row(), row(temperature=0)])[::2] == [130, 0]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1e-5}, {"temperature": 1e-45}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}],
    ids=str,
)
def test_the_narrowest_settings_leave_the_likeliest_token(sampling):
    x = logits(100, 1000, seed=5)
    assert sample(x, [row(seed=seed, **sampling) for seed in range(100)]) == x.argmax(-1).tolist()


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    x = torch.full((4000, VOCAB_SIZE), -10.0)
    x[:, [10, 100]] = 1.0
    x[:, [20, 150, 290]] = 0.0
    for sampling in ({"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.7}):
        assert set(sample(x, [row(seed=seed, **sampling) for seed in range(4000)])) == {10, 20, 100, 150, 290}


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_a_logit_bias_of_a_hundred_forces_or_bans(bias):
    x = logits(200, seed=6)
    sampled = sample(x, [row(seed=seed, logit_bias={42: bias, 10**6: 100.0, -1: 100.0}) for seed in range(200)])
    assert set(sampled) == {42} if bias > 0 else 42 not in sampled


def test_no_bad_word_is_completed_and_each_token_of_it_may_come():
    x = torch.zeros(1, VOCAB_SIZE)
    x[0, [20, 21, 22]] = torch.tensor([30.0, 29.0, 28.0])
    words = ((20, 20), (21, 20, 21), (22,))
    output: list[int] = []
    for _ in range(6):
        (token_id,) = sample(x, [row(output=output, temperature=0.0, bad_words=words)])
        output.append(token_id)
    assert output == [20, 21, 20, 0, 20, 21]
    # What would be behind a draft counts as behind the output.
    for num in range(len(output)):
        asked = row(output=output[:num], temperature=0.0, bad_words=words)
        asked.draft_token_ids = output[num:5]
        assert sample(x, [asked]) == output[5:]


def test_what_is_not_wanted_comes_where_a_grammar_leaves_nothing_else():
    x = logits(seed=4)
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    words[1] = 0b110
    for sampling in ({"bad_words": ((33,), (34,))}, {"allowed_token_ids": (1, 2)}):
        for is_compiled in (True, False):
            masks = Masks([0], [Bits(words, words.ctypes.data)])
            sampled = Sampler(VOCAB_SIZE, EOS, is_compiled).sample(x.clone(), [row(**sampling)], masks=masks)
            assert sampled.token_ids[0] in (33, 34)


def test_no_stop_token_comes_before_min_tokens_and_all_may_come_from_then_on():
    x = torch.zeros(2000, VOCAB_SIZE)
    x[:, [5, *EOS]] = 8.0

    def sampled(**sampling: object) -> set[int]:
        rows = [row(seed=seed, output=[1, 2], stop_token_ids=(5, 10**6), **sampling) for seed in range(2000)]
        return set(sample(x, rows)) & {5, *EOS}

    assert sampled(min_tokens=3) == set()
    assert sampled(min_tokens=2) == {5, *EOS}
    assert sampled(min_tokens=3, ignore_eos=True) == set(EOS)


def test_penalties_kept_step_by_step_equal_those_made_from_scratch():
    sampling = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.4}
    sampler = Sampler(VOCAB_SIZE, EOS)
    kept = row(seed=11, prompt=[*range(40), 10**6], **sampling)
    for step in range(300):
        x = logits(2, scale=1.0, seed=step)
        x[1] = x[0]
        anew = Row(kept.sampling, kept.seed, kept.prompt_token_ids, list(kept.output_token_ids))
        first, second = sampler.sample(x, [kept, anew]).token_ids
        assert first == second
        assert x[0].equal(x[1])
        kept.output_token_ids.append(first)


BROKEN = {
    "nan": (5, math.nan),
    "+inf": (5, math.inf),
    "nan at a forbidden token": (7, math.nan),
    "all -inf": (slice(None), -math.inf),
}


@pytest.mark.parametrize(("where", "value"), BROKEN.values(), ids=BROKEN)
@features
def test_a_broken_row_fails_alone(where, value, sampling):
    sampling = {"min_tokens": 9, "num_logprobs": 2, **sampling}
    x = logits(5, seed=7)
    rows = [row(seed=seed, **sampling) for seed in range(5)]
    expected = sample(x, rows)
    x[2, where] = value
    sampled = Sampler(VOCAB_SIZE, EOS).sample(x, rows)
    assert sampled.token_ids == [*expected[:2], UNUSABLE, *expected[3:]]
    assert [i for i, logprob in enumerate(sampled.logprobs) if logprob is None] == [2]


@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 1e-30])
def test_a_penalty_that_rewards_as_much_as_may_be_has_a_token_repeated(penalty):
    x = logits(2).abs_()
    rows = [row(prompt=[5], repetition_penalty=penalty, temperature=temperature) for temperature in (0.0, 1.0)]
    assert sample(x, rows) == [5, 5]


def test_all_tokens_but_one_may_be_impossible():
    x = torch.full((8, 1000), -math.inf)
    x[:, 999] = -5.0
    assert sample(x, [row(**s) for s in [{}, {"top_p": 0.5}, {"top_k": 9}, {"min_p": 0.1}] * 2]) == [999] * 8


def test_logprobs_are_of_the_raw_distribution_and_only_for_rows_that_ask():
    x = logits(4, seed=8)
    raw = torch.log_softmax(x.double(), -1)
    rows = [
        row(temperature=0.3, num_logprobs=20, logit_bias={9: 50.0}, repetition_penalty=2.0),
        row(),
        row(temperature=0, num_logprobs=0),
        row(seed=3, num_logprobs=5, top_k=1),
    ]
    sampled = Sampler(VOCAB_SIZE, EOS).sample(x, rows)
    assert sampled.token_ids[0] == 9
    assert sampled.logprobs[1] is None
    for i, num in ((0, 20), (2, 0), (3, 5)):
        logprob = sampled.logprobs[i]
        assert logprob.logprob == pytest.approx(raw[i, sampled.token_ids[i]].item(), abs=1e-5)
        values, ids = raw[i].topk(num)
        assert logprob.top_token_ids == ids.tolist()
        assert logprob.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)


def test_equal_logprobs_are_listed_by_token_id():
    x = torch.zeros(1, 40)
    x[0, [31, 3, 17]] = 1.0
    logprob = Sampler(40, EOS).sample(x, [row(num_logprobs=5)]).logprobs[0]
    assert logprob.top_token_ids == [3, 17, 31, 0, 1]


@pytest.mark.parametrize("num", [1, 2, 5, 20])
def test_so_they_are_in_a_large_vocabulary_whose_model_rounds_them(num):
    x = logits(8, 5000).round()
    likeliest = x.sort(stable=True, descending=True, dim=-1).indices[:, :num].tolist()
    sampled = Sampler(5000, EOS).sample(x, [row(num_logprobs=num, temperature=0)] * 8)
    assert [logprob.top_token_ids for logprob in sampled.logprobs] == likeliest
    assert sampled.token_ids == [first for first, *_ in likeliest]


def test_more_logprobs_than_tokens_are_all_tokens():
    logprob = Sampler(10, EOS).sample(logits(1, 10), [row(num_logprobs=20)]).logprobs[0]
    assert sorted(logprob.top_token_ids) == list(range(10))
    assert sum(map(math.exp, logprob.top_logprobs)) == pytest.approx(1.0, abs=1e-5)


@features
def test_maxima_that_are_known_are_not_looked_for_and_adjusted_with_their_logits(sampling):
    kernels = library()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    x = logits(40, 1000, seed=9)
    rows = [row(seed=seed, output=OUTPUT, **sampling) for seed in range(40)]
    expected = sample(x, rows)
    maxima = kernels.maxima(x)
    assert Sampler(1000, EOS).sample(adjusted := x.clone(), rows, maxima).token_ids == expected
    assert torch.equal(maxima, kernels.maxima(adjusted))


def test_a_batch_of_256_large_rows_samples_in_bounded_memory():
    x = torch.zeros(1, 151_936).expand(256, -1).contiguous()
    rows = [row(seed=seed, top_p=0.9) for seed in range(256)]
    assert min(Sampler(151_936, EOS).sample(x, rows).token_ids) >= 0
