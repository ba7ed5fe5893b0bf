"""Answers held to grammars, whatever else their requests wish: the same with guesses and without, drawn by the compiled
kernels or by torch, before their masks are known or with all of them made beforehand."""

from __future__ import annotations

import json
import random

import pytest

from tests.gateway.texts import byte_level
from tests.worker.guided import EOS, VOCAB_SIZE, Guided, guided_model
from tests.worker.schemas import a_schema
from worker.grammar.masks import MaskMaker

NUM_REQUESTS = 40
EXPRESSION = "(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


def a_wish(chance: random.Random) -> dict[str, object]:
    some = [chance.randrange(2, VOCAB_SIZE) for _ in range(3)]
    choices: dict[str, list[object]] = {
        "top_k": [1, 3, 40],
        "top_p": [0.3, 0.9],
        "min_p": [0.05, 0.5],
        "presence_penalty": [-2.0, 1.5],
        "frequency_penalty": [-0.7, 0.4],
        "repetition_penalty": [0.8, 1.6],
        "logit_bias": [{EOS: 5.0}, {EOS: -100.0}, dict.fromkeys(some, 6.0), dict.fromkeys(some, -100.0)],
        "allowed_token_ids": [tuple(range(0, VOCAB_SIZE, 2)), tuple(some)],
        "bad_words": [tuple((token_id,) for token_id in range(5, VOCAB_SIZE, 3)), ((some[0], some[1]), (some[2],))],
        "min_tokens": [4, 30],
        "stop_token_ids": [tuple(some)],
        "ignore_eos": [True],
        "num_logprobs": [0, 3],
    }
    asked = {name: chance.choice(choices[name]) for name in chance.sample(sorted(choices), chance.choice([0, 1, 2, 4]))}
    return {"temperature": chance.choice([0.0, 0.5, 1.0]), "max_tokens": chance.choice([12, 60]), **asked}


def told(path, seed: int, speculates: bool = True, is_compiled: bool = True, is_for_device: bool = False):
    chance = random.Random(seed)
    guided = Guided(path, is_compiled, max_sequences=16)
    guided.engine.speculates = speculates
    guided.engine._drawing._mask_maker = MaskMaker(is_for_device)
    for number in range(NUM_REQUESTS):
        kind, source = chance.choice(
            [
                ("json_schema", json.dumps(a_schema(random.Random(1000 * seed + number)))),
                ("json_schema", '{"type": "array", "items": {"enum": ["again and again"]}, "minItems": 3}'),
                ("json_object", ""),
                ("regex", EXPRESSION),
                ("", ""),
            ]
        )
        guided.submit(f"r{number}", kind, source, chance.random() < 0.5, seed=number, **a_wish(chance))
    guided.run()
    guided.close()
    return guided


@pytest.mark.parametrize("seed", range(3))
def test_answers_to_all_wishes_are_the_same_by_every_way(path, seed):
    plain = told(path, seed, speculates=False)
    for way in (
        {"speculates": True},
        {"speculates": False, "is_compiled": False},
        {"speculates": False, "is_for_device": True},
        {"speculates": True, "is_compiled": False, "is_for_device": True},
    ):
        other = told(path, seed, **way)
        assert other.failures.keys() == plain.failures.keys(), way
        assert other.answers.keys() == plain.answers.keys()
        for name, answer in plain.answers.items():
            same = other.answers[name]
            assert (same.token_ids, same.reason) == (answer.token_ids, answer.reason), (way, name)
            assert len(same.logprobs) == len(answer.logprobs)
            for one, two in zip(answer.logprobs, same.logprobs, strict=True):
                assert two.logprob == pytest.approx(one.logprob, abs=1e-3), (way, name)
                assert two.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-3)


@pytest.mark.parametrize("expression", ["[a-c]{20}", "(forced words){3}"])
def test_logits_that_are_no_numbers_are_not_the_grammars_fault(path, expression):
    guided = Guided(path)
    forward = guided.runner.forward
    guided.runner.forward = lambda spans, before=None: forward(spans, before) * float("nan")
    stop = byte_level().token_to_id("Z")
    guided.submit("x", "regex", expression, min_tokens=9, stop_token_ids=(stop,))
    guided.run().close()
    assert (guided.failures["x"].code, guided.engine.stats().num_cached_blocks) == ("internal", 0)
