"""Seeded walks over all that can happen to answers that are held to grammars."""

import os
import random

import pytest

from tests.gateway.texts import byte_level
from tests.worker.guided_walk import NUM_CASES, Walk, cases

NUM_WALKS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("guided")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("walk", range(NUM_WALKS))
def test_answers_are_what_they_are_alone_after_any_walk(path, walk, monkeypatch):
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(1 << 32))) + walk
    try:
        Walk(path, seed, cases(path, seed, NUM_CASES), monkeypatch).run()
    except BaseException:
        print(f"seed {seed}: PENSTOCK_TEST_SEED={seed} and walk 0 repeat it")
        raise
