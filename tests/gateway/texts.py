"""Small tokenizers of every kind, trained on the spot, and models' directories around them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.text import Text

SENTENCES = (
    "The miller's daughter walked to the river and counted seven white stones.",
    "What is the capital of the valley? The capital of the valley is Arden.",
    "naïve façade, Größe, Москва, 東京, 한국어, العربية",
    '{"name": "weather", "arguments": {"city": "Arden"}}',
    "one two three four five six seven eight nine ten, 3.14 and 42",
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """As GPT-2's and its many descendants: every byte is a character of an alphabet, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: pieces of words behind a visible space, and byte tokens for characters that have no piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[:2], trainer)
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    for token in byte_tokens:
        vocabulary.setdefault(token, len(vocabulary))
    return Tokenizer.from_str(json.dumps(description))


@cache
def word_pieces() -> Tokenizer:
    """As BERT's: a kind that has no bytes, so tokenizers' own stream decodes it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    )
    return tokenizer


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "word pieces": word_pieces}


def model_directory(
    path: Path, tokenizer: Tokenizer | None = None, template: str | None = CHATML, **config: object
) -> Path:
    """What lies beside a model's weights."""
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def a_text(path: Path, **others: object) -> Text:
    return Text.load(model_directory(path, **others))  # type: ignore[arg-type]
