"""A model's text out of a GGUF's metadata: read and written as the tokenizer that was put there does it."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks import gguf_tokenizers
from gateway.openai import Message
from gateway.text import Text, TextInvalid
from gateway.text.gguf import _CUTS, described
from policies.model_source import SourceError
from sources import place_of
from tests.gateway.texts import CHATML, SENTENCES

TEXTS = (
    *SENTENCES,
    "I'LL we've it's DON'T  camelCase HTTPServer x=f(y)[0]+{'a':1}; #!? $5 1234567 3.14 ½",
    "  leading and  double spaces, and more at the end   ",
    "\tdef f():\r\n\n\n    return 1\n",
    "🙂👩‍👩‍👧 e\u0301 \u200b\ufeff",
    "",
    " ",
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level(cut: str) -> Tokenizer:
    """As the model's own authors would make one that cuts words like that."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=_CUTS[cut].takes_whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *[pre_tokenizers.Split(Regex(expression), "isolated") for expression in _CUTS[cut].expressions],
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@cache
def sentence_piece(has_space: bool = True) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 50),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_space,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str | None, **metadata: Any) -> Path:
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = description["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
    return _closed(writer, path, metadata)


def write_sentence_piece(
    path: Path, model: sentencepiece.SentencePieceProcessor, more: tuple[str, ...] = (), **metadata: Any
) -> Path:
    """``more``: tokens that an author added, which stand for themselves."""
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*[model.id_to_piece(i) for i in ids], *more])
    writer.add_token_scores([*[model.get_score(i) for i in ids], *[-1000.0 for _ in more]])
    writer.add_token_types([*kinds, *[4 for _ in more]])
    return _closed(writer, path, metadata)


def _closed(writer: gguf.GGUFWriter, path: Path, metadata: dict[str, Any]) -> Path:
    for key, value in metadata.items():
        key = key if key.startswith("chat_template") else f"ggml.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("cut", [*_CUTS, None])
def test_words_are_cut_by_the_name_of_their_expression(tmp_path, cut):
    own = byte_level(cut or "default")
    path = write_byte_level(tmp_path / "a.gguf", own, cut)
    tokenizer = described(path).tokenizer
    for text in TEXTS:
        if not _CUTS[cut or "default"].composes:
            assert tokenizer.encode(text, add_special_tokens=False).ids == own.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) in (text, text.replace("e\u0301", "é"))


WORDS = {
    "deepseek-llm": "I|'|ll| say|:| |你好|，|世界|!| x|2345| =| | y|\r|\n|\tÇ|a| va|?| (|ok|)| HTTP|3",
    "deepseek-coder": "I|'|ll| say|:| |你好|，|世界|!| x|2|3|4|5| = | y|\r|\n|\tÇa| va|?| (|ok|)| HTTP|3",
    "deepseek-v3": "I|'ll| say|:| |你好|，|世界|!| x|234|5| =| y|\r\n|\tÇa| va|?| (|ok|)| HTTP|3",
    "seed-coder": "I|'ll| say|:| 你好|，世界|!| x|2|3|4|5| =| | y|\r\n|\tÇa| va|?| (|ok|)| HTTP|3",
    "kimi-k2": "I'll| say|:| |你好|，|世界|!| x|234|5| =| | y|\r\n|\tÇa|和|あ| va|?| (|ok|)| HTTP|3",
    "viking": "I'll| say:| 你好|，|世界|!| x|2|3|4|5| =| | y|\r\n\t|Ça| va|? (|ok|)| HTTP|3",
    "refact": "I|'ll| say|:| 你好|，|世界|!| x|2|3|4|5| =| | y|\r\n|\t|Ça| va|?| (|ok|)| HTTP|3",
}
"""By the rules of llama.cpp's src/llama-vocab.cpp, and as its tokens are cut."""


@pytest.mark.parametrize("cut", WORDS)
def test_words_are_those_of_llama_cpp(cut):
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _CUTS[cut].expressions]
    words = pre_tokenizers.Sequence(splits).pre_tokenize_str(WORDS[cut].replace("|", ""))
    assert "|".join(word for word, _ in words) == WORDS[cut]


def test_the_benchmark_counts_texts_whose_tokens_differ(tmp_path, monkeypatch):
    own = byte_level("gpt-2")
    path = write_byte_level(tmp_path / "a.gguf", own, "gpt-2")
    monkeypatch.setattr(gguf_tokenizers, "theirs", lambda _, path, asked: [own.encode(text).ids for text in asked])
    asked = gguf_tokenizers.texts()
    assert gguf_tokenizers.compared("", path, asked) == f"0 of {len(asked)} differ"
    other = gguf_tokenizers.renamed(path, "smollm", tmp_path / "b.gguf")
    numbers = list(map(str, range(1000)))  # one of the two cuts digits from each other
    assert int(gguf_tokenizers.compared("", other, numbers).split()[0]) > 9
    assert gguf_tokenizers.compared("", gguf_tokenizers.renamed(path, "odd", other), asked).startswith("refused: ")


@pytest.mark.parametrize("has_space", [True, False])
@given(
    text=st.lists(st.sampled_from([*" \n\t", *"abeorst.,19", *SENTENCES, "▁", "é", "東", "🙂"]), max_size=12).map(
        "".join
    )
)
def test_sentence_piece_reads_a_text_alike(tmp_path_factory, has_space, text):
    model, tokenizer = sentence_piece(has_space), _sentence_piece(tmp_path_factory.getbasetemp(), has_space)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert token_ids == model.encode(text)
    assert tokenizer.decode(token_ids) == model.decode(token_ids)


@cache
def _sentence_piece(folder: Path, has_space: bool) -> Tokenizer:
    path = write_sentence_piece(folder / f"{has_space}.gguf", sentence_piece(has_space), add_space_prefix=has_space)
    return described(path).tokenizer


async def test_answers_are_decoded_by_the_fast_tables(tmp_path):
    write_byte_level(tmp_path / "a.gguf", byte_level("llama-bpe"), "llama-bpe")
    write_sentence_piece(tmp_path / "b.gguf", sentence_piece())
    write_sentence_piece(tmp_path / "c.gguf", sentence_piece(False), add_space_prefix=False)
    for name in "abc":
        text = Text.load(tmp_path / f"{name}.gguf")
        assert text.vocabulary.is_table
        for words in TEXTS:
            (token_ids,) = await text.encode([words])
            decoder, whole = text.decoder(), text.decode(token_ids)
            assert decoder.feed(token_ids[:9]) + decoder.feed(token_ids[9:]) + decoder.finish() == whole


async def test_a_prompt_begins_as_the_file_or_its_kind_says(tmp_path):
    own = byte_level("llama-bpe")
    (begin,) = own.encode("<s>").ids
    hello = own.encode("Hello").ids
    for pre, metadata, expected in (
        ("llama-bpe", {}, [begin, *hello]),
        ("llama-bpe", {"add_bos_token": False}, hello),
        ("dbrx", {}, own.encode("Hello").ids),
        ("dbrx", {"add_bos_token": True}, [begin, *hello]),
    ):
        path = write_byte_level(tmp_path / "a.gguf", own, pre, bos_token_id=begin, **metadata)
        assert await Text.load(path).encode(["Hello"]) == [expected]
    model = sentence_piece()
    path = write_sentence_piece(tmp_path / "a.gguf", model, bos_token_id=1)
    assert await Text.load(path).encode(["What is"]) == [[1, *model.encode("What is")]]


async def test_a_conversation_is_written_by_the_template_inside(tmp_path):
    own = byte_level("qwen2")
    metadata = {"chat_template": "{{ bos_token }}" + CHATML, "chat_template.tool_use": "{{ eos_token }}tools"}
    path = write_byte_level(tmp_path / "a.gguf", own, "qwen2", bos_token_id=0, eos_token_id=1, **metadata)
    text = Text.load(path)
    prompt = "<s><|im_start|>user\nWhat is the capital?<|im_end|>\n<|im_start|>assistant\n"
    assert await text.encode_chat([Message("user", "What is the capital?")]) == own.encode(prompt).ids
    assert await text.encode_chat([Message("user", "Hello")], tools=[{}]) == own.encode("</s>tools").ids


async def test_tokens_that_an_author_added_stand_for_themselves(tmp_path):
    model = sentence_piece()
    path = write_sentence_piece(tmp_path / "a.gguf", model, ("<tool>", "   "))
    first = model.vocab_size()
    (token_ids,) = await Text.load(path).encode(["one<tool>two   three"])
    assert token_ids == [*model.encode("one"), first, *model.encode("two"), first + 1, *model.encode("three")]
    assert Text.load(path).decode(token_ids) == "one<tool> two    three"


def test_a_gguf_of_another_name_is_known_by_what_it_begins_with(tmp_path):
    path = write_byte_level(tmp_path / "sha256-6a0746a1", byte_level("qwen2"), "qwen2")
    assert place_of(str(path)) == path
    assert described(path).tokenizer.get_vocab_size()
    path.write_text("a note")
    with pytest.raises(SourceError, match="is a file; a model is"):
        place_of(str(path))


def test_a_model_that_may_not_be_read_is_refused_in_a_sentence(monkeypatch):
    def locked(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", locked)  # root, as whom tests may run, is let in everywhere
    for source in ("/srv/models/mine", "/srv/models/mine.gguf"):
        with pytest.raises(SourceError, match=f"^{source} cannot be read by the user that this runs as: Permission"):
            place_of(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "~nobody-of-this-name/model",
            "~nobody-of-this-name/model cannot be read: Could not determine home directory.",
        ),
        ("m" * 5000, "m{200} cannot be read: File name too long"),
    ],
    ids=["a home of nobody", "too long"],
)
def test_a_model_whose_name_no_path_can_have_is_refused_in_a_sentence(source, said):
    with pytest.raises(SourceError, match=f"^{said}$"):
        place_of(source)


def test_a_directory_with_one_gguf_is_that_file(tmp_path):
    path = write_byte_level(tmp_path / "a.gguf", byte_level("qwen2"), "qwen2")
    assert place_of(str(path)) == place_of(str(tmp_path)) == path
    (tmp_path / "b.gguf").touch()
    with pytest.raises(SourceError, match=r"holds 2 GGUF files; name one of them, such as a\.gguf"):
        place_of(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert place_of(str(tmp_path)) == tmp_path


REFUSED = {
    "a kind of tokenizer": (lambda c: c.replace(b"gpt2", b"bert"), "its tokenizer is of the kind bert"),
    "a pre-tokenizer": (lambda c: c.replace(b"qwen2", b"qwen9"), "its pre-tokenizer qwen9 is not known; known are "),
    "no tokens": (lambda c: c.replace(b"ggml.tokens", b"ggml.tokenz"), "it lacks tokenizer.ggml.tokens"),
    "no merges": (lambda c: c.replace(b"ggml.merges", b"ggml.mergez"), "it lacks tokenizer.ggml.merges"),
    "no kinds": (lambda c: c.replace(b"ggml.token_type", b"ggml.token_typo"), "it lacks tokenizer.ggml.token_type"),
    "a merge of nothing": (lambda c: c.replace(b"t h", b"\xc2\xb5h"), "its tokenizer cannot be used: "),
    "half a file": (lambda c: c[: len(c) // 2], "it is cut short: it ends within its header"),
    "nothing": (lambda c: b"", "it is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_one_sentence(tmp_path, what):
    spoil, said = REFUSED[what]
    path = write_byte_level(tmp_path / "a.gguf", byte_level("qwen2"), "qwen2")
    content = spoil(path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(TextInvalid, match=said) as broken:
        Text.load(path)
    assert str(broken.value).isprintable()


def test_a_token_that_is_there_twice_is_named(tmp_path):
    path = write_sentence_piece(tmp_path / "a.gguf", sentence_piece(), ("<tool>", "<tool>"))
    with pytest.raises(TextInvalid, match="its token <tool> is there twice"):
        Text.load(path)


def test_a_token_as_long_as_the_file_is_not_taken_apart_at_every_place(tmp_path):
    path = write_sentence_piece(tmp_path / "a.gguf", sentence_piece(), ("a" * (2 << 20),))
    content = path.read_bytes()
    kinds = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 4 + 12
    last = kinds + 4 * sentence_piece().vocab_size()
    path.write_bytes(content[:last] + (1).to_bytes(4, "little") + content[last + 4 :])
    assert Text.load(path)  # which took minutes


@cache
def a_file(folder: Path) -> bytes:
    return write_sentence_piece(folder / "a.gguf", sentence_piece(), bos_token_id=1).read_bytes()


@given(at=st.floats(0, 1), value=st.integers(0, 255), num_bytes=st.integers(0, 8))
def test_a_damaged_file_costs_a_sentence_at_most(tmp_path_factory, at, value, num_bytes):
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(a_file(folder))
    begin = int(at * len(content))
    content[begin : begin + num_bytes] = bytes([value]) * num_bytes
    path = folder / "damaged.gguf"
    path.write_bytes(content if num_bytes else content[:begin])
    said = _refusal_of(path)
    assert said.isprintable()
    assert said or num_bytes or begin > len(content) - 32  # past the last value there is but padding


def _refusal_of(path: Path) -> str:
    try:
        Text.load(path)
    except TextInvalid as error:
        return str(error)
    return ""
