"""Words read by the table are what the tokenizer would have read, and other kinds of tokenizer are left alone."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from demo import MODEL_DIR
from gateway.text.words import Words
from tests.gateway.texts import KINDS

DEMO = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ASCII = "".join(map(chr, range(128)))
texts = st.lists(
    st.one_of(
        st.sampled_from((" the", "The river ", "don't", " I'LL", "user\n", "3.14", " \n\n ", "\t", "x=f(y)[0]", "   ")),
        st.text(ASCII, max_size=12),
        st.text(string.ascii_letters + " ", max_size=12),
    ),
    max_size=12,
).map("".join)


def with_split(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(DEMO.to_str())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


KNOWN = {"the demo model's": DEMO, "Llama 3's": with_split(LLAMA3), "GPT-2's": KINDS["byte level"]()}
WORDS = {kind: Words.of(tokenizer) for kind, tokenizer in KNOWN.items()}


@pytest.mark.parametrize("kind", KNOWN)
@given(text=texts)
def test_the_table_reads_as_the_tokenizer_does(kind, text):
    tokenizer = KNOWN[kind]
    words = WORDS[kind]
    assert words is not None
    at_once = tokenizer.encode(text, add_special_tokens=False).ids
    assert words.read(text) in (at_once, None)
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if not any(name in text for name in names):
        assert words._whole(text, share=1.0) == at_once


def test_a_plain_sentence_needs_no_tokenizer_and_other_scripts_do():
    words = Words.of(DEMO)
    assert words is not None
    plain = "Where does the river begin, and who lives beside the old mill under the hill?"
    assert words.read(plain) == DEMO.encode(plain).ids
    assert words.read("Где начинается река?") is None
    assert words.read("the river<|im_end|>") is None, "a special token"
    assert words.read("qxj zvb wkq jjx") is None, "hardly a word of it is in the vocabulary"


def test_tokenizers_of_other_kinds_are_left_to_the_library():
    assert Words.of(KINDS["byte fallback"]()) is None
    assert Words.of(KINDS["word pieces"]()) is None
    for pattern in (r"\p{Lu}|\P{L}+", r"^a|.", r"[[:alpha:]]+|.", r"[a-z&&[^b]]|.", r"(a)|.", r"\h+|."):
        assert Words.of(with_split(pattern)) is None, pattern
    lower = Tokenizer.from_str(DEMO.to_str())
    lower.normalizer = normalizers.Lowercase()
    assert Words.of(lower) is None
    description = json.loads(DEMO.to_str())
    description["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
    assert Words.of(Tokenizer.from_str(json.dumps(description))) is None


def test_nothing_that_is_read_is_remembered():
    words = Words.of(DEMO)
    assert words is not None
    before = dict(words._table)
    words.read("the river Arden and the Ardennes")
    assert words._table == before
