"""Masks that follow from another one, of where more of the same had room."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from policies import wire
from policies.grammar import spelled
from tests.worker.test_grammar_places import after, num_met_again
from worker.grammar.lengths import Counted
from worker.grammar.nodes import KeptMasks
from worker.grammar.places import places_of
from worker.grammar.vocabulary import made

BYTES = [bytes([byte]) for byte in (*range(0x20, 0x7F), *b"\t\n\r", *"é東😀".encode())]
BLANKS = [b" " * num for num in (2, 3, 4, 8, 16, 20, 33, 63, 64, 65)] + [b"\n\n", b"\n    ", b'  "', b"   ]", b"  , "]
WORDS = [b"ab", b"abcdef", b"ab cd ef gh", "é東".encode(), "naïve 😀".encode(), b"a\xc3", b"\xa9b", b"x" * 12]
QUOTED = [b'ab"', b'abcdef" ,', b'","', b'a","bcdef', b'", "abc', b'abcdef","abcdef"']
ESCAPES = [
    b"\\n",
    b"a\\nb",
    b'\\"ab',
    b'\\\\"',
    b"\\u",
    b"\\u00",
    b"\\u0009",
    b"a\\u001",
    b"\\ud83d",
    b"\\udc00",
    b"\\u0009ab",
]
CHARS = [char.encode() for char in "é東😀"]
BEGUN = [char[:num] for char in CHARS for num in range(1, len(char))]
ENDING = [
    char[len(begun) :] + b"x" * num
    for char in CHARS
    for begun in BEGUN
    if char.startswith(begun)
    for num in (1, 4, 7, 9)
]
TOKENS = list(dict.fromkeys([b"\xff<end>", *BYTES, *BLANKS, *WORDS, *QUOTED, *ESCAPES, *ENDING]))
NUM_WALKS = 60


@pytest.fixture(scope="module")
def vocabulary():
    return made(dict(enumerate(TOKENS)), len(TOKENS) + 3, [0])  # some have no name


def texts(**bounds):
    return wire.Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "string", **bounds}}), True)


@pytest.mark.parametrize(
    "bounds", [{"maxLength": 13}, {"maxLength": 7, "minLength": 3}, {"maxLength": 1}, {"minLength": 4}, {}]
)
def test_masks_within_texts_and_blanks_are_those_that_llguidance_makes(vocabulary, bounds):
    assert num_met_again(vocabulary, texts(**bounds), NUM_WALKS, end=0) > 1000


def test_and_so_they_are_in_objects(vocabulary):
    person = {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}, "any": {}}
    schema = {"type": "object", "properties": person, "required": ["age"], "additionalProperties": False}
    grammar = wire.Grammar("json_schema", json.dumps({"type": "array", "items": schema, "maxItems": 4}))
    assert num_met_again(vocabulary, grammar, NUM_WALKS, end=0) > 400
    assert num_met_again(vocabulary, wire.Grammar("json_object", ""), NUM_WALKS, end=0) > 1000


def test_one_mask_serves_all_that_have_less_room(vocabulary):
    grammar = texts(maxLength=13)
    known = places_of(grammar, vocabulary, KeptMasks(), counted=Counted.of(vocabulary))
    ids = {token: token_id for token_id, token in enumerate(TOKENS)}
    first, blank, letter = ids[b'"'], ids[b" "], ids[b"a"]
    begin = after(known, [ids[b"["], first])
    matcher = LLMatcher(vocabulary, spelled(grammar), log_level=0)
    assert matcher.consume_tokens([ids[b"["], first])
    words = -(-vocabulary.vocab_size // 32)
    known.keep(begin, np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[:words])
    place = begin
    for num_left in range(12, 0, -1):
        place = known.after(place, letter)
        bits = known.mask(place).bits.words
        may_come = {token for token, at in ids.items() if bits[at >> 5] >> (at & 31) & 1}
        assert (b"x" * 12 in may_come) is (num_left >= 12)
        assert (b"abcdef" in may_come) is (num_left >= 6)
        assert b'","' in may_come
    assert known.after(place, letter).lengths is None
    # Blanks before anything else are as many as there are, and no more than 64.
    comma = after(known, [letter, first, ids[b","]], begin)
    assert known.mask(after(known, [blank], comma)) is None
    early, late = after(known, [blank] * 2, comma), after(known, [blank] * 60, comma)
    assert early.like is late.like
    assert (early.limit, late.limit) == (62, 4)
    assert after(known, [blank] * 64, comma).lengths is None


@pytest.mark.parametrize("begun", [b"\\", *BEGUN])
def test_it_does_so_within_a_character_and_behind_a_backslash(vocabulary, begun):
    grammar = texts(maxLength=13, minLength=2)
    known = places_of(grammar, vocabulary, KeptMasks(), counted=Counted.of(vocabulary))
    ids = {token: token_id for token_id, token in enumerate(TOKENS)}
    words = -(-vocabulary.vocab_size // 32)
    told = set()
    for num_before in range(13):
        token_ids = [ids[bytes([byte])] for byte in b'["' + b"a" * num_before + begun]
        matcher = LLMatcher(vocabulary, spelled(grammar), log_level=0)
        assert matcher.consume_tokens(token_ids)
        own = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[:words]
        place = after(known, token_ids)
        kept = known.mask(place)
        assert (kept is None) is (num_before <= 2), num_before
        assert kept is None or kept.bits.words.tobytes() == own.tobytes(), num_before
        known.keep(place, own)
        told.add(own.tobytes())
    assert len(told) > 3


def test_what_a_wider_place_says_is_forgotten_with_its_mask(vocabulary, monkeypatch):
    known = places_of(texts(maxLength=13), vocabulary, KeptMasks(), counted=Counted.of(vocabulary))
    begin = after(known, [TOKENS.index(b"["), TOKENS.index(b'"')])
    monkeypatch.setattr("worker.grammar.nodes.MAX_MASK_BYTES", 4 * -(-vocabulary.vocab_size // 32))
    full = np.full(-(-vocabulary.vocab_size // 32), -1, dtype=np.int32) & ~0
    known.keep(begin, full & np.int32(0x7FFFFFFF))
    other = known.after(begin, TOKENS.index(b"a"))
    chance = random.Random(1)
    assert begin.mask is not None
    for _ in range(3):
        place = after(known, chance.choices([TOKENS.index(b"a"), TOKENS.index(b"b")], k=3), other)
        known.keep(place, full)
    assert begin.mask is None
    assert known.mask(other) is None
