"""Texts that are too long are told from those that fit, and are not read to their ends."""

from __future__ import annotations

import pytest
from tokenizers import Encoding, Tokenizer

from gateway.errors import ContextLengthExceeded
from gateway.openai import Message
from gateway.text import Text, length
from policies import settings
from tests.gateway.texts import KINDS, SENTENCES, a_text, byte_fallback, byte_level, model_directory


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("words", [SENTENCES[0], '{"a": 1}, ', "x", "東京", "stone \n\t  "])
def test_what_just_fits_is_not_found_too_long(monkeypatch, tokenizer, words):
    monkeypatch.setattr(length, "CHARS_A_TOKEN", 0)
    monkeypatch.setattr(length, "PIECE_CHARS", 4096)
    text = words * (50_000 // len(words))
    num_tokens = len(tokenizer.encode(text).ids)
    length.check_length(text, num_tokens, lambda piece: len(tokenizer.encode(piece).ids))
    with pytest.raises(length.TooLong):
        length.check_length(text, num_tokens // 2, lambda piece: len(tokenizer.encode(piece).ids))


def test_only_so_much_is_read_as_is_needed_to_know_it(monkeypatch):
    monkeypatch.setattr(length, "PIECE_CHARS", 100)
    read: list[str] = []

    def count(piece: str) -> int:
        read.append(piece)
        return len(piece)

    length.check_length("x" * 5000, 1000, count)
    assert read == []
    with pytest.raises(length.TooLong) as refused:
        length.check_length("x" * 5001, 1000, count)
    assert (len(read), refused.value.num_tokens, refused.value.max_tokens) == (11, 1078, 1000)


@pytest.mark.parametrize("num_words", [100, 5000])
async def test_a_prompt_that_is_too_long_is_refused_with_the_number_of_its_tokens(tmp_path, num_words):
    text = Text.load(model_directory(tmp_path), settings.Text(inline_chars=1))
    words = "stone " * num_words
    (token_ids,) = await text.encode([words])
    assert await text.encode([words], max_tokens=len(token_ids)) == [token_ids]
    with pytest.raises(
        ContextLengthExceeded, match=r"is 50 tokens\. However, your input resulted in \d+ tokens\..* may be more tokens"
    ) as found:
        await text.encode(["stone", words], max_tokens=50, param="input")
    assert found.value.param == "input"
    chats = a_text(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(ContextLengthExceeded, match="your messages resulted in"):
        await chats.encode_chat([Message("user", words * 10)], max_tokens=50)


class Watched:
    """A tokenizer that remembers how much it has read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [*SENTENCES, "x", "x " * 99 + "y" * 300, "stone \n\t  "])
def test_a_text_begins_alike_whether_or_not_it_is_read_to_its_end(kind, words):
    tokenizer = KINDS[kind]()
    texts = [words * (num_chars // len(words) + 1) for num_chars in (10, 1000, 20_000)]
    for max_tokens in (1, 7, 150):
        for text, beginning in zip(texts, length.beginnings(texts, max_tokens, tokenizer), strict=True):
            ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
            assert beginning == (text[: ends[max_tokens - 1]] if len(ends) > max_tokens else text)


def test_only_so_much_of_a_text_is_read_as_its_beginning_needs():
    watched, stones = Watched(byte_level()), "stone " * 500_000
    few, many, short = length.beginnings([stones, "x" * 3_000_000, "stone"], 100, watched)
    assert len(byte_level().encode(few).ids) == 100
    assert (stones.startswith(few), short) == (True, "stone")
    assert many == "x" * len(many)
    assert watched.num_chars < 10_000
