"""Masks that are kept by where in an expression an answer is."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from policies import wire
from policies.grammar import spelled
from tests.worker.guided import EOS, VOCAB_SIZE, Guided, guided_model
from worker.grammar import places, store
from worker.grammar.places import NOWHERE, places_of
from worker.grammar.vocabulary import read_vocabulary

SOURCES = [
    "([a-z]{1,9}(, |[.] |[0-9]{2}-))+x{40}",
    r"^(?:\w+\s\d{1,3}|[^a-f\n]*;|.{0,7}!|forced words)+$",
    r"(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+",
    "(a?){12}b|[-a-]+/",
]
NUM_WALKS, NUM_TOKENS = 40, 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.mark.parametrize("source", SOURCES)
def test_wherever_two_answers_are_at_one_place_the_same_may_follow(path, source):
    vocabulary = read_vocabulary(path, VOCAB_SIZE, [EOS])
    grammar = wire.Grammar("regex", source)
    beginning, known = LLMatcher(vocabulary, spelled(grammar), log_level=0), places_of(grammar, vocabulary)
    masks: dict[int, bytes] = {}
    num_again = 0
    for seed in range(NUM_WALKS):
        chance, matcher, place = random.Random(seed), beginning.deep_copy(), known.begin
        for _ in range(NUM_TOKENS):
            forced, mask = matcher.compute_ff_tokens(), matcher.compute_bitmask()
            if matcher.is_stopped():
                break
            # How what must come is cut depends on what was before.
            if place != NOWHERE and not forced:
                num_again += place in masks
                assert masks.setdefault(place, mask) == mask, (source, seed)
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            token_id = chance.choice(np.flatnonzero(bits).tolist())
            if token_id == EOS:
                break
            assert matcher.consume_token(token_id)
            place = known.after(place, token_id)
    assert num_again > 100


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE])
def test_answers_are_the_same_with_masks_that_are_kept_few_that_are_and_none(path, monkeypatch, top_k):
    told, num_made = [], []
    for max_masks in (32, 2, None):
        if max_masks is None:
            monkeypatch.setattr(store, "places_of", lambda *grammar: None)
        else:
            monkeypatch.setattr(places, "MAX_MASKS", max_masks)
        guided = Guided(path, max_sequences=16, deterministic=True)
        guided.engine.speculates = False
        for seed in range(12):
            asked = {"max_tokens": 50, "seed": seed, "temperature": seed % 3 / 2, "min_tokens": seed, "top_k": top_k}
            guided.submit(f"s{seed}", "regex", SOURCES[seed % len(SOURCES)], **asked)
        guided.run()
        guided.close()
        assert not guided.failures
        told.append({name: answer.token_ids for name, answer in guided.answers.items()})
        num_made.append(guided.engine.stats().num_masks)
    assert told[0] == told[1] == told[2]
    assert num_made[0] < num_made[2]


def test_what_is_not_read_or_has_too_many_states_is_nowhere(path, monkeypatch):
    vocabulary = read_vocabulary(path, VOCAB_SIZE, [EOS])
    for kind, source in (("regex", "[]a]b"), ("regex", "(?i)a"), ("regex", "a^b"), ("choice", '["a"]')):
        assert places_of(wire.Grammar(kind, source), vocabulary) is None
    known = places_of(wire.Grammar("regex", "[a-zé]+"), vocabulary)
    plain, other = (vocabulary.tokenize_str(text)[0] for text in "aé")
    assert known.after(known.begin, plain) != NOWHERE
    assert known.after(known.after(known.begin, plain), other) == NOWHERE
    monkeypatch.setattr(places, "MAX_STATES", 40)
    known = places_of(wire.Grammar("regex", "(a?){30}"), vocabulary)
    assert known.after(known.begin, plain) == NOWHERE


def test_tokens_that_must_come_have_bytes_that_must(path):
    vocabulary = read_vocabulary(path, VOCAB_SIZE, [EOS])
    num_forced = 0
    for source in (*SOURCES, "(first word|first letter){3}"):
        beginning = LLMatcher(vocabulary, spelled(wire.Grammar("regex", source)), log_level=0)
        for seed in range(NUM_WALKS):
            chance, matcher = random.Random(seed), beginning.deep_copy()
            while not matcher.is_stopped():
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
                may_come = [token_id for token_id in np.flatnonzero(bits).tolist() if token_id != EOS]
                has_bytes = bool(matcher.compute_ff_bytes())
                forced = matcher.compute_ff_tokens()
                assert has_bytes or not forced
                assert not forced or may_come == forced[:1]
                num_forced += bool(forced)
                if not may_come or chance.random() < 0.02:
                    break
                matcher.consume_token(chance.choice(may_come))
    assert num_forced > 100
