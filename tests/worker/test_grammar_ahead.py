"""What is found out of a grammar before anybody's answer begins."""

import itertools
import json

import numpy as np
import pytest
from llguidance import LLMatcher

from policies import wire
from policies.grammar import spelled
from tests.gateway.texts import byte_level
from tests.worker.guided import EOS, VOCAB_SIZE, Guided, guided_model
from worker.grammar import ahead, places
from worker.grammar.ahead import look_ahead
from worker.grammar.errors import NoVocabulary
from worker.grammar.lengths import Counted
from worker.grammar.nodes import NONE, KeptMasks
from worker.grammar.places import places_of
from worker.grammar.trail import Trail
from worker.grammar.vocabulary import read_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["customer", "supplier"]},
        "code": {"type": "string", "pattern": "^[a-z]{1,4}-[0-9]{2}$"},
    },
    "required": ["name", "kind", "code"],
    "additionalProperties": False,
}
PEOPLE = wire.Grammar("json_schema", json.dumps({"type": "array", "items": PERSON}))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture
def vocabulary(path):
    return read_vocabulary(path, VOCAB_SIZE, [EOS])


def looked_ahead(vocabulary, grammar, step_s=0.0):
    """Its places, its beginning, and how many masks were made; by a clock that goes on so far with each look."""
    counted = Counted.of(vocabulary)
    known = places_of(grammar, vocabulary, KeptMasks(), counted=counted)
    beginning = LLMatcher(vocabulary, spelled(grammar), log_level=0)
    ticks = itertools.count()
    return known, beginning, look_ahead(known, beginning, vocabulary, counted, lambda: step_s * next(ticks))


def test_whatever_an_answer_comes_to_is_known_with_llguidances_own_masks(vocabulary):
    known, beginning, num_masks = looked_ahead(vocabulary, PEOPLE)
    text = '[ {"name": "é\\n東x", "kind":"supplier","code":"ab-17"}, {"name":"", "kind" : "customer","code":"z-00"}]'
    place, matcher, token_id = known.begin, beginning.deep_copy(), NONE
    num_found = 0
    for token_id in vocabulary.tokenize_bytes(text.encode()):
        if not matcher.compute_ff_bytes():
            own = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            assert known.mask(place).bits.words.tobytes() == own[: -(-vocabulary.vocab_size // 32)].tobytes()
            num_found += 1
        matcher.consume_token(token_id)
        place = known.after(place, token_id)
        assert known.node(place, token_id, Trail(matcher)) is not None
    assert num_found > 30
    assert 30 < num_masks < 200
    # Nobody has asked for one that is not there.
    assert looked_ahead(vocabulary, PEOPLE)[2] == num_masks


def test_it_ends_in_time_with_few_masks_and_few_places_where_there_is_no_end(vocabulary, monkeypatch):
    anything = wire.Grammar("json_object", "")
    assert looked_ahead(vocabulary, anything, ahead.MAX_S / 10)[2] < 10
    monkeypatch.setattr(ahead, "MAX_PLACES", 300)
    known, _, num_masks = looked_ahead(vocabulary, anything)
    assert 50 < num_masks < 300
    with monkeypatch.context() as few:
        few.setattr(ahead, "MAX_BYTES", 20 * 4 * -(-vocabulary.vocab_size // 32))
        assert looked_ahead(vocabulary, anything)[2] == 20
    monkeypatch.setattr(places, "MAX_WEIGHT", 2000)
    known, _, _ = looked_ahead(vocabulary, anything)
    assert known.is_half_full
    # What comes later is found when it is met.
    deep = vocabulary.tokenize_bytes(b'{"a":' * 20)
    place = known.begin
    for token_id in deep:
        place = known.after(place, token_id)
    assert place.tells


def test_answers_are_the_same_whether_a_grammar_was_looked_through_or_not(path, monkeypatch):
    told, num_made = [], []
    for max_s in (1e9, 0.0):
        monkeypatch.setattr(ahead, "MAX_S", max_s)
        guided = Guided(path, max_sequences=16, deterministic=True)
        guided.engine.speculates = False
        for seed in range(8):
            asked = {"max_tokens": 50, "seed": seed, "temperature": seed % 3 / 2}
            guided.submit(f"s{seed}", PEOPLE.kind, PEOPLE.source, is_strict=seed % 2 == 0, **asked)
            guided.submit(f"x{seed}", "regex", "([a-z]{1,9}(, |[.] |[0-9]{2}-))+", **asked)
            guided.submit(f"j{seed}", "json_object", "", **asked)
        guided.run()
        guided.close()
        assert not guided.failures
        told.append({name: (answer.token_ids, answer.reason) for name, answer in guided.answers.items()})
        num_made.append(guided.engine.stats().num_masks)
    assert told[0] == told[1]
    # How many are made beside depends on who came to a place first.
    assert num_made[0] < 0.75 * num_made[1]


def test_a_vocabulary_with_an_id_beyond_all_is_given_up_before_it_is_laid_out(tmp_path):
    description = json.loads(byte_level().to_str())
    description["model"]["vocab"]["far away"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(NoVocabulary, match="cannot be read for grammars: a token of it has the id 4294967295"):
        read_vocabulary(tmp_path, VOCAB_SIZE, [EOS])
