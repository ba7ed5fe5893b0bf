"""Masks that are kept by where in its grammar an answer is."""

import functools
import gc
import json
import random
from weakref import ref

import numpy as np
import pytest
from llguidance import LLMatcher

from policies import wire
from policies.grammar import spelled
from tests.worker.guided import EOS, VOCAB_SIZE, Guided, guided_model
from tests.worker.schemas import a_schema
from worker.grammar import guide, nodes, places, store
from worker.grammar.ahead import look_ahead
from worker.grammar.guide import Guide
from worker.grammar.lengths import Counted
from worker.grammar.nodes import NONE, NOWHERE, KeptMasks
from worker.grammar.places import places_of
from worker.grammar.trail import Trail
from worker.grammar.vocabulary import read_vocabulary

SOURCES = [
    "([a-z]{1,9}(, |[.] |[0-9]{2}-))+x{40}",
    r"^(?:\w+\s\d{1,3}|[^a-f\n]*;|.{0,7}!|forced words)+$",
    r"(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+",
    "(a?){12}b|[-a-]+/",
]
SCHEMA = {
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{1,4}(-[0-9]{1,3})?$"}},
    "type": "array",
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "bc", "bd", 7, None]},
            "name": {"type": "string", "minLength": 2, "maxLength": 6},
            "size": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1},
            "any": {},
            "more": {"anyOf": [{"type": "null"}, {"type": "string"}, {"$ref": "#/properties/none"}]},
        },
        "required": ["kind", "tags"],
        "additionalProperties": False,
    },
    "properties": {"none": {"type": "object", "additionalProperties": {"type": "number"}}},
}
MARKS = (b'"', b"]", b"}", b":", b",")
NUM_SCHEMAS = 100
NUM_WALKS, NUM_TOKENS = 40, 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture
def vocabulary(path):
    return read_vocabulary(path, VOCAB_SIZE, [EOS])


def after(known, token_ids, place=None):
    """Where an answer is with these, from there or from its beginning."""
    return functools.reduce(known.after, token_ids, place or known.begin)


def num_met_again(vocabulary, grammar, num_walks=NUM_WALKS, end=EOS, looks_ahead=False):
    """Answers by chance, each of whose places has the mask that it had in the answers before, or that another one had
    that it is like, but for what is too long where there is a limit. What is known of plain tokens without asking is
    so."""
    beginning = LLMatcher(vocabulary, spelled(grammar), log_level=0)
    counted = Counted.of(vocabulary)
    known = places_of(grammar, vocabulary, KeptMasks(), counted=counted)
    assert known is not None
    if looks_ahead:
        look_ahead(known, beginning, vocabulary, counted)
    told: dict[object, object] = {}
    num_again = 0
    num_tokens, num_bytes = vocabulary.vocab_size, 4 * -(-vocabulary.vocab_size // 32)
    for seed in range(num_walks):
        chance, matcher, place, token_id = random.Random(seed), beginning.deep_copy(), known.begin, NONE
        trail = Trail(beginning.deep_copy())
        for _ in range(NUM_TOKENS):
            must_go_on, forced = bool(matcher.compute_ff_bytes()), matcher.compute_ff_tokens()
            mask, is_stopped = matcher.compute_bitmask(), matcher.is_stopped()
            if place.tells:
                # How what must come is cut depends on what was before.
                facts = must_go_on, is_stopped, None if forced else mask
                where = (place.like, token_id) if must_go_on else place.like, place.lengths and place.limit
                num_again += where in told
                assert told.setdefault(where, facts) == facts, (grammar, seed)
                node = known.node(place, token_id, trail)
                assert (node.forced, node.is_whole) == ((forced or [NONE])[0], is_stopped), (grammar, seed)
                assert place.lengths is None or not (must_go_on or is_stopped), (grammar, seed)
                if not forced:
                    kept = known.mask(place)
                    num_again += kept is not None
                    assert kept is None or kept.bits.words.tobytes() == mask[:num_bytes], (grammar, seed)
                    known.keep(place, np.frombuffer(mask[:num_bytes], dtype=np.int32))
                assert place.room is None or not (must_go_on or is_stopped), (grammar, seed)
            if is_stopped:
                break
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            may_come = np.flatnonzero(bits).tolist()
            if place.room:
                assert {each for each in range(num_tokens) if known.fits(place, each)} <= set(may_come), (grammar, seed)
            # Texts end sooner than by chance.
            marks = [each for each in may_come if vocabulary.decode_bytes([each])[:1] in MARKS] or may_come
            token_id = chance.choice(marks if chance.random() < 0.3 else may_come)
            if token_id == end:
                break
            assert matcher.consume_token(token_id)
            trail.token_ids.append(token_id)
            place = known.after(place, token_id)
    return num_again


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_wherever_two_answers_are_at_one_place_the_same_may_follow(vocabulary, source, looks_ahead):
    assert num_met_again(vocabulary, wire.Grammar("regex", source), looks_ahead=looks_ahead) > 100


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_and_so_it_is_in_schemas_and_in_any_json(vocabulary, looks_ahead):
    assert num_met_again(vocabulary, wire.Grammar("json_object", "", True), 65, looks_ahead=looks_ahead) > 1000
    num_again = num_met_again(
        vocabulary, wire.Grammar("json_schema", json.dumps(SCHEMA), True), looks_ahead=looks_ahead
    )
    assert num_again > 200
    for seed in range(NUM_SCHEMAS):
        grammar = wire.Grammar("json_schema", json.dumps(a_schema(random.Random(seed))), seed % 2 == 0)
        num_again += num_met_again(vocabulary, grammar, 4, looks_ahead=looks_ahead)
    assert num_again > 1500


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE])
def test_answers_are_the_same_with_places_that_are_known_few_that_are_and_none(path, monkeypatch, top_k):
    told, num_made = [], []
    for num_kept in (None, 1, 0):
        if num_kept == 0:
            monkeypatch.setattr(store, "places_of", lambda *grammar: None)
        elif num_kept == 1:
            # Of masks two, of steps from node to node a few, and llguidance hears of every third token at least.
            monkeypatch.setattr(nodes, "MAX_MASK_BYTES", 128)
            monkeypatch.setattr(places, "MAX_STEPS", 20)
            monkeypatch.setattr(guide, "MAX_BEHIND", 3)
        guided = Guided(path, max_sequences=16, deterministic=True)
        guided.engine.speculates = False
        for seed in range(12):
            asked = {"max_tokens": 50, "seed": seed, "temperature": seed % 3 / 2, "min_tokens": seed, "top_k": top_k}
            asked["stop_token_ids"] = [EOS, 97] if seed % 4 == 0 else []
            guided.submit(f"r{seed}", "regex", SOURCES[seed % len(SOURCES)], **asked)
            guided.submit(f"s{seed}", "json_schema", json.dumps(SCHEMA), is_strict=seed % 2 == 0, **asked)
            guided.submit(f"j{seed}", "json_object", "", is_strict=seed % 2 == 0, **asked)
        guided.run()
        guided.close()
        assert not guided.failures
        told.append({name: (answer.token_ids, answer.reason) for name, answer in guided.answers.items()})
        num_made.append(guided.engine.stats().num_masks)
    assert told[0] == told[1] == told[2]
    assert num_made[0] < num_made[2]


def test_answers_that_are_followed_from_node_to_node_are_where_their_bytes_lead(vocabulary):
    grammar = wire.Grammar("json_schema", json.dumps(SCHEMA))
    beginning = LLMatcher(vocabulary, spelled(grammar), log_level=0)
    known = places_of(grammar, vocabulary, KeptMasks(), counted=Counted.of(vocabulary))
    num_by_length = 0
    for seed in range(NUM_WALKS):
        chance, held = random.Random(seed), Guide(Trail(beginning.deep_copy()), vocabulary, frozenset(), places=known)
        token_ids: list[int] = []
        while not held.is_whole and len(token_ids) < NUM_TOKENS:
            bits = np.unpackbits(np.frombuffer(held.matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            token_id = chance.choice([each for each in np.flatnonzero(bits).tolist() if each != EOS])
            if held.node is not None and token_id not in held.node.after:
                num_by_length += known.plain[token_id] in held.node.after_plain
            held.advance(token_id)
            token_ids.append(token_id)
            there = after(known, token_ids)
            assert held.node is None or held.node.at is there, (seed, token_ids)
            trail = Trail(beginning.deep_copy())
            trail.token_ids.extend(token_ids)
            node = known.node(there, token_id, trail) if there.tells else None
            assert (node and node.forced) == (held.node and held.node.forced), (seed, token_ids)
    assert num_by_length > 10


def test_how_many_values_a_list_has_counts_near_its_bounds_only(vocabulary):
    inner = {"type": "array", "items": {"enum": [7, [1], "text"]}, "minItems": 14, "maxItems": 30}
    grammar = wire.Grammar("json_schema", json.dumps({"type": "array", "items": inner, "minItems": 2}))
    assert num_met_again(vocabulary, grammar) > 500
    known = places_of(grammar, vocabulary, KeptMasks(), counted=Counted.of(vocabulary)._replace(most_commas=1))
    tokens = {num: vocabulary.tokenize_str("[[" + ",".join(["7"] * num)) for num in range(1, 31)}
    like = {num: after(known, token_ids).like for num, token_ids in tokens.items()}
    assert like[1] is like[2] is like[9]
    assert like[14] is like[15] is like[25]
    assert len({like[num] for num in range(1, 31)}) == 2 + 4 + 5


def test_masks_keep_no_grammar_that_nobody_else_keeps(vocabulary):
    masks, num_words = KeptMasks(), -(-vocabulary.vocab_size // 32)
    known = [places_of(wire.Grammar("regex", f"[a-z]+{number}"), vocabulary, masks) for number in range(3)]
    for each in known:
        each.keep(each.begin, np.zeros(num_words, dtype=np.int32))
    kept = [ref(each.mask(each.begin).bits.words) for each in known]
    del each, known[:2]
    gc.collect()
    assert [words() is not None for words in kept] == [False, False, True]


def test_what_is_not_read_or_has_too_many_states_is_nowhere(vocabulary, monkeypatch):
    kinds = ("regex", "[]a]b"), ("regex", "(?i)a"), ("regex", "a^b"), ("choice", '["a"]'), ("json_schema", '{"if": {}}')
    for kind, source in kinds:
        assert places_of(wire.Grammar(kind, source), vocabulary, KeptMasks()) is None
    known = places_of(wire.Grammar("regex", "[a-zé]+"), vocabulary, KeptMasks())
    plain, other = (vocabulary.tokenize_str(text)[0] for text in "aé")
    assert known.after(known.begin, plain) is not NOWHERE
    assert after(known, [plain, other]) is NOWHERE
    monkeypatch.setattr(places, "MAX_WEIGHT", 60)
    known = places_of(wire.Grammar("regex", "(a?){30}"), vocabulary, KeptMasks())
    assert known.after(known.begin, plain) is NOWHERE


@pytest.mark.parametrize(
    ("before", "other", "is_same"),
    [
        ('[{"kind":"a"', '[{"kind":"bc"', True),
        ('[{"kind":"a","tags":["ab-1"]},', '[{"kind":7,"tags":["x", "yz"]},', True),
        ('[{"kind":"a","tags":["ab', '[{"kind":"a","tags":["cd', True),
        ('[{"kind":"a","name":"ab', '[{"kind":"a","name":"é東', True),
        ('[{"kind":"a","name":"ab', '[{"kind":"a","name":"abc', False),
        ('[{"kind":"b', '[{"kind":"a', False),
        ('[{"kind":"a","size":12', '[{"kind":"a","size":15', False),
        ('[{"kind":"a","name":"abc"', '[{"kind":"a"', False),
        ('[{"kind":"a","tags":["x"],"more":null}', '[{"kind":"a","tags":["x"],"more":"text"}', True),
        ('[{"kind":"a","tags":["x"]},{"kind":"a","tags":["x"]}', '[{"kind":"a","tags":["x"]}', False),
        ('[{"kind":"a","tags":["x"],"more":{"b', '[{"kind":"a","tags":["x"],"more":{"c', None),
        ('[{"kind":"a","name":"a\\n', '[{"kind":"a","name":"éb', True),
        ('[{"kind":"a","name":"a\\u00', '[{"kind":"a","name":"a\\', False),
        ('[{"kind":"a","name":"a\\ud83d', '[{"kind":"a","name":"a\\uD99', None),
        ('[{"kind":"a","tags":["x"],"any":{"k":[1.5e', '[{"kind":"a","tags":["y"],"any":{"l":[-20E', True),
        ('[{"kind":"a","tags":["x"],"any":{"k":[1.5e', '[{"kind":"a","tags":["x"],"any":{"k":[1.5', False),
        ('[{"kind":"a","tags":["x"],"any":["', '[{"kind":"a","tags":["x"],"any":["long \\" text', True),
    ],
)
def test_of_values_that_are_over_a_place_has_no_more_than_counts(vocabulary, before, other, is_same):
    known = places_of(wire.Grammar("json_schema", json.dumps(SCHEMA)), vocabulary, KeptMasks())
    one, two = (after(known, vocabulary.tokenize_str(text)) for text in (before, other))
    assert NOWHERE not in (one, two)
    assert one.tells is two.tells is (is_same is not None)
    assert is_same is None or (one is two) is is_same


def test_lists_in_one_another_have_places_as_far_as_a_few_levels_and_are_found_again_after_them(vocabulary):
    lists = {"type": "array", "items": {"$ref": "#"}}
    known = places_of(wire.Grammar("json_schema", json.dumps(lists)), vocabulary, KeptMasks())
    opening, closing, comma = (vocabulary.tokenize_str(text) for text in "[],")
    within, far = after(known, opening), after(known, opening * 2001)
    assert NOWHERE is not far is not within
    assert not far.tells
    assert after(known, closing * 2000 + comma, far) is after(known, opening + closing + comma, within)
    assert after(known, closing * 2000, far).tells


def test_tokens_that_must_come_have_bytes_that_must(vocabulary):
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
