"""What the answers of one request share is read once where they begin together, and each is what it would be alone."""

from __future__ import annotations

from collections import UserList

import pytest
import torch

from policies.terms import Sampling
from worker.sampler import Row, Sampler

VOCAB_SIZE = 300
WISHES = Sampling(
    100,
    temperature=1.0,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    repetition_penalty=1.4,
    logit_bias={7: 2.0},
    bad_words=((3,), (5, 6)),
)


class Prompt(UserList):
    """Counts how often it is read from its beginning."""

    num_read = 0

    def __getitem__(self, place):
        self.num_read += place == 0
        return super().__getitem__(place)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_prompt_is_read_once_for_all_answers_to_it_and_none_knows_of_the_others(is_compiled):
    prompt = Prompt(range(2, 90, 3))
    once = Prompt(prompt.data)
    sampler = Sampler(VOCAB_SIZE, (1,), is_compiled)
    sampler.sample(torch.zeros(1, VOCAB_SIZE), [Row(WISHES, 0, once, [])])
    together = [Row(WISHES, seed, prompt, []) for seed in range(8)]
    apart = [Row(WISHES, seed, prompt.data, []) for seed in range(8)]
    for step in range(40):
        logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))
        drawn = sampler.sample(logits.clone(), together).token_ids
        alone = [sampler.sample(logits[at : at + 1].clone(), [row]).token_ids[0] for at, row in enumerate(apart)]
        assert drawn == alone
        for token_id, *rows in zip(drawn, together, apart, strict=True):
            for row in rows:
                row.output_token_ids.append(token_id)
    assert prompt.num_read == once.num_read
