"""Whoever drafts, sampled tokens come as often as the model says: chi-square over whole answers, context by context."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import wire
from policies.terms import Sampling
from tests.worker import test_eagle, test_medusa
from tests.worker.test_draft_model import TINY, clock
from tests.worker.test_engine_models import Families
from tests.worker.test_speculation import everything
from tests.worker.tiny import VOCAB_SIZE, checkpoint, oracle_logits
from worker.engine import Engine
from worker.runner import Runner
from worker.sampler import Sampler
from worker.speculation import Speculation, StoreDrafter, SuffixDrafter
from worker.speculation.model import ModelDrafter

WORDS = [5, 17, 40, 41, 77, 90]
"""All that may be said, so that whoever says one of them is often right."""
BIAS = {token_id: -100.0 for token_id in range(VOCAB_SIZE) if token_id not in WORDS}
PROMPT = WORDS * 3
TEMPERATURE = 1.3
NUM_TOKENS = 5
NUM_COUNTED = 3
"""Tokens of an answer that are counted by what is before them in it; of later ones there would be too few of each."""
NUM_ANSWERS, NUM_TOGETHER = 1600, 32


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def silenced(weight):
    """[vocab_size, hidden_size]: nothing but those words is ever likeliest."""
    kept = torch.zeros_like(weight)
    kept[WORDS] = weight[WORDS]
    return kept


def suffix(families, directory):
    return families.runner("llama"), SuffixDrafter()


def store(families, directory):
    return families.runner("llama"), StoreDrafter()


def draft_model(families, directory):
    checkpoint(directory, "LlamaForCausalLM", seed=5)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = silenced(tensors["lm_head.weight"])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return families.runner("llama"), ModelDrafter(Runner.load(str(directory), TINY), clock())


def medusa(families, directory):
    heads = test_medusa.random_heads()
    with torch.no_grad():
        for head in heads:
            head[-1].weight.copy_(silenced(head[-1].weight))
    return test_medusa.drafter_of(families, test_medusa.saved(heads, directory))


def eagle(families, directory):
    head = test_eagle.random_head(num_tokens=len(WORDS))
    head["d2t"] = torch.tensor(WORDS) - torch.arange(len(WORDS))
    return test_medusa.drafter_of(families, test_eagle.saved(head, directory, draft_vocab_size=len(WORDS)))


def expected_of(oracle, said):
    """[len(WORDS)]: how likely each of them is behind these."""
    logits = oracle_logits(oracle, [*PROMPT, *said])[-1, WORDS]
    return (logits / TEMPERATURE).softmax(0)


@pytest.mark.parametrize("drafter_of", [suffix, store, draft_model, medusa, eagle])
def test_sampled_frequencies_are_the_models_whoever_drafts(families, tmp_path, drafter_of):
    runner, drafter = drafter_of(families, tmp_path)
    speculation = Speculation([drafter], NUM_TOKENS, everything, float)  # no time passes: nothing is ever too dear
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
    engine = Engine(runner, sampler, TINY, float, speculation=speculation)
    counts = {}
    for begin in range(0, NUM_ANSWERS, NUM_TOGETHER):
        answers = {}
        for seed in range(begin, begin + NUM_TOGETHER):
            sampling = Sampling(NUM_TOKENS, temperature=TEMPERATURE, seed=seed, logit_bias=BIAS, ignore_eos=True)
            assert engine.add(wire.Submit(str(seed), PROMPT, sampling)) is None
        while engine.has_work:
            deltas, failed = engine.step()
            assert not failed
            for delta in deltas:
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        for answer in answers.values():
            for place, token_id in enumerate(answer[:NUM_COUNTED]):
                seen = counts.setdefault(tuple(answer[:place]), [0] * len(WORDS))
                seen[WORDS.index(token_id)] += 1
    assert not speculation.num_faults
    assert speculation.num_accepted_tokens > 80
    assert speculation.num_accepted_tokens < 0.9 * speculation.num_drafted_tokens, "some of it was wrong, too"
    chi_square, num_free = 0.0, 0
    for said, seen in counts.items():
        num = sum(seen)
        cells = [
            (float(p) * num, count) for p, count in zip(expected_of(families.oracle("llama"), said), seen, strict=True)
        ]
        rare = [cell for cell in cells if cell[0] < 5]
        cells = [cell for cell in cells if cell[0] >= 5]
        if rare:
            cells.append((sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)))
        if len(cells) > 1 and min(expected for expected, _ in cells) > 1:
            chi_square += sum((count - expected) ** 2 / expected for expected, count in cells)
            num_free += len(cells) - 1
    assert num_free > 60
    assert chi_square < one_in_a_thousand(num_free), (chi_square, num_free)


def one_in_a_thousand(num_free):
    """What chi-square exceeds so seldom (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * num_free)
    return num_free * (1 - spread + 3.09 * math.sqrt(spread)) ** 3
