"""Tokens become the tokenizer's own text, however few of them come at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from gateway.text.detokenize import Vocabulary
from tests.gateway.texts import KINDS, SENTENCES, SPECIALS, byte_fallback, byte_level, word_pieces

BYTES = {"byte level": Vocabulary(byte_level()), "byte fallback": Vocabulary(byte_fallback())}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def pieces(draw: st.DrawFn, token_ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.sets(st.integers(0, len(token_ids)), max_size=8)) | {0, len(token_ids)})
    return [token_ids[a:b] for a, b in itertools.pairwise(cuts)]


def test_tokenizers_that_spell_bytes_are_decoded_by_table():
    assert {kind: Vocabulary(make()).is_table for kind, make in KINDS.items()} == {
        "byte level": True,
        "byte fallback": True,
        "word pieces": False,
    }


@pytest.mark.parametrize("kind", BYTES)
@given(st.data())
def test_any_text_comes_back_from_any_split(kind, data):
    vocabulary = BYTES[kind]
    token_ids = KINDS[kind]().encode(data.draw(texts), add_special_tokens=False).ids
    decoder = vocabulary.decoder(continues=False)
    parts = [decoder.feed(piece) for piece in pieces(data.draw, token_ids)]
    assert all("�" not in part for part in parts) or "�" in KINDS[kind]().decode(token_ids)
    assert "".join(parts) + decoder.finish() == KINDS[kind]().decode(token_ids)


@given(st.data())
def test_any_bytes_at_all_decode_as_the_tokenizer_decodes_them(data):
    vocabulary = BYTES["byte level"]
    token_ids = data.draw(st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=40))
    decoder = vocabulary.decoder(continues=False)
    text = "".join(decoder.feed(piece) for piece in pieces(data.draw, token_ids)) + decoder.finish()
    assert text == byte_level().decode(token_ids)


def spaced() -> Tokenizer:
    """Its own decoder keeps the space of the token that was added at the beginning of a text, which no table does."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.add_tokens([AddedToken("▁note")])
    return tokenizer


SPACED = Vocabulary(spaced())


@given(st.data())
def test_any_text_comes_back_where_the_tokenizer_itself_decodes(data):
    assert not SPACED.is_table
    token_ids = spaced().encode(data.draw(texts), add_special_tokens=False).ids
    decoder = SPACED.decoder(continues=False)
    parts = [decoder.feed(piece) for piece in pieces(data.draw, token_ids)]
    assert "".join(parts) + decoder.finish() == spaced().decode(token_ids)


@given(st.data())
def test_bytes_that_are_no_characters_end_no_answer_where_the_tokenizer_itself_decodes(data):
    token_ids = data.draw(st.lists(st.integers(0, spaced().get_vocab_size() - 1), max_size=40))
    decoder, other = SPACED.decoder(continues=False), SPACED.decoder(continues=False)
    text = "".join(decoder.feed(piece) for piece in pieces(data.draw, token_ids)) + decoder.finish()
    assert text == other.feed(token_ids) + other.finish()
    letters = [decoder.feed([spaced().token_to_id(letter)]) for letter in "river"]
    assert "".join(letters).endswith("river")


@pytest.mark.parametrize("sentence", SENTENCES)
def test_other_kinds_are_decoded_by_the_library(sentence):
    token_ids = word_pieces().encode(sentence).ids
    decoder = Vocabulary(word_pieces()).decoder(continues=False)
    text = "".join(decoder.feed([token_id]) for token_id in token_ids) + decoder.finish()
    assert text == word_pieces().decode(token_ids)


def test_no_character_is_cut():
    vocabulary, smile = BYTES["byte level"], "🙂"
    token_ids = byte_level().encode(smile).ids
    assert len(token_ids) == 4
    decoder = vocabulary.decoder(continues=False)
    assert [decoder.feed([token_id]) for token_id in token_ids] == ["", "", "", smile]
    assert decoder.finish() == ""


def test_a_character_that_never_ended_is_one_replacement():
    decoder = BYTES["byte level"].decoder(continues=False)
    assert decoder.feed(byte_level().encode("🙂").ids[:3]) == ""
    assert decoder.finish() == "\ufffd"


def test_special_tokens_say_nothing_but_other_added_ones_do():
    vocabulary = BYTES["byte level"]
    token_ids = [byte_level().token_to_id(name) for name in (*SPECIALS, "<tool_call>")]
    assert vocabulary.decoder(continues=False).feed(token_ids) == "<tool_call>"


def test_added_tokens_of_several_spaces_are_spaces_as_in_gemmas():
    spaced = Tokenizer.from_str(byte_fallback().to_str())
    spaced.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("<table>", normalized=False)])
    vocabulary = Vocabulary(spaced)
    assert vocabulary.is_table
    two, table, byte = [spaced.token_to_id(token) for token in ("▁▁", "<table>", "<0xE6>")]
    assert vocabulary.decoder(continues=True).feed([two, table]) == "  <table>"
    assert [vocabulary.token_bytes(token_id) for token_id in (two, table, byte)] == [b"  ", b"<table>", b"\xe6"]


def test_a_token_beyond_the_vocabulary_says_nothing():
    vocabulary = BYTES["byte level"]
    decoder = vocabulary.decoder(continues=False)
    assert decoder.feed([100_000, *byte_level().encode("river").ids, 100_000]) == "river"
    assert vocabulary.token_bytes(100_000) == b""


def test_a_first_space_belongs_to_a_text_that_goes_on():
    vocabulary = BYTES["byte fallback"]
    token_ids = byte_fallback().encode("river").ids
    assert vocabulary.decoder(continues=False).feed(token_ids) == "river"
    assert vocabulary.decoder(continues=True).feed(token_ids) == " river"


def test_a_token_by_itself_shows_bytes_that_are_no_character():
    vocabulary = BYTES["byte level"]
    first = byte_level().encode("🙂").ids[0]
    assert vocabulary.token_text(first) == "\\xf0"
    assert vocabulary.token_bytes(first) == b"\xf0"
    assert vocabulary.token_text(byte_level().token_to_id("<|im_end|>")) == "<|im_end|>"


def test_a_table_that_disagrees_with_the_tokenizer_is_not_used():
    odd = Tokenizer.from_str(byte_fallback().to_str())
    odd.decoder = decoders.Sequence([decoders.Replace("e", "E"), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(odd)
    assert not vocabulary.is_table
    token_ids = odd.encode("the river").ids
    decoder = vocabulary.decoder(continues=False)
    assert decoder.feed(token_ids) + decoder.finish() == odd.decode(token_ids)
