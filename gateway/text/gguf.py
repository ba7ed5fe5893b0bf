"""The tokenizer and the chat template that a GGUF file carries in its metadata.

A byte-level BPE comes as tokens and merges, with the name of the expression that cuts a text into words; the BPE of
SentencePiece comes as tokens with scores, from which the merges follow. Names, defaults and expressions are llama.cpp's
(its src/llama-vocab.cpp).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from policies.gguf import GgufInvalid, Header, parse, shown

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens."""
_SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Cut(NamedTuple):
    """How a byte-level BPE reads a text."""

    expressions: tuple[str, ...]
    """Each cuts what the ones before it left whole."""
    takes_whole_words: bool = False
    """A word that is a token needs no merges."""
    adds_begin: bool = False
    composes: bool = False
    """Characters are composed first (Unicode's NFC)."""


_LLAMA3 = _Cut((rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",), takes_whole_words=True, adds_begin=True)
_QWEN2 = _Cut((rf"{_WORDS}\p{{N}}{_REST}",), composes=True)
_TEKKEN = _Cut(
    (rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_REST}",),
    takes_whole_words=True,
    adds_begin=True,
)
_GPT4O = _Cut(
    (rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}{_CASED_REST}",),
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = (f"{kinds.removesuffix(']')}{_NOT_HAN}" for kinds in (_UPPER, _LOWER))
_KIMI = _Cut(
    (
        rf"\p{{Han}}+|{_BEFORE}{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDING}|{_BEFORE}{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDING}"
        rf"|\p{{N}}{{1,3}}{_REST}",
    )
)
_GPT2_ALONE = _Cut((_GPT2,))
_DIGITS = _Cut((r"\p{N}", _GPT2))
_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK = _Cut(
    (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+"),
)
_CUTS = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mellum", "a.x-4.0", "exaone4"), _GPT2_ALONE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    "smaug-bpe": _LLAMA3._replace(takes_whole_words=False, adds_begin=False),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _LLAMA3._replace(takes_whole_words=False, adds_begin=False)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2._replace(composes=False),
    "seed-coder": _Cut((rf"{_WORDS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": _Cut(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+",
        )
    ),
    "kimi-k2": _KIMI,
    "viking": _Cut((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


class Described(NamedTuple):
    """What a model's text needs."""

    tokenizer: Tokenizer
    variables: dict[str, str]
    """Names of special tokens, as chat templates call them."""
    templates: dict[str, str]
    """By name, "default" among them where there is one."""


def described(path: Path) -> Described:
    """Raises GgufInvalid, and OSError where the file cannot be read."""
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise GgufInvalid("it is empty") from None
        with mapped, memoryview(mapped) as view:
            return _described(parse(view))


def _described(header: Header) -> Described:
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise header.wrong("tokenizer.ggml.token_type")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise GgufInvalid(f"its token {shown(twice)} is there twice")
    kind = header.text("tokenizer.ggml.model")
    try:
        match kind:
            case "gpt2":
                tokenizer, adds_begin = _byte_level(header, vocabulary)
            case "llama":
                tokenizer, adds_begin = _sentence_piece(header, vocabulary, kinds)
            case _:
                raise GgufInvalid(f"its tokenizer is of the kind {shown(kind)}; those that are read are gpt2 and llama")
    except GgufInvalid:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise GgufInvalid(f"its tokenizer cannot be used: {shown(str(error))}") from None
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, of in zip(tokens, kinds, strict=True) if of == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, of in zip(tokens, kinds, strict=True)
            if of == _USER_DEFINED and token
        ]
    )
    named = {name: _token(header, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
    if header.flag("tokenizer.ggml.add_bos_token", adds_begin) and named["bos"] is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[named["bos"], "$A"], special_tokens=[(named["bos"], vocabulary[named["bos"]])]
        )
    words = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    variables = {words[name]: token for name, token in named.items() if token is not None}
    return Described(tokenizer, variables, _templates(header))


def _byte_level(header: Header, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """And whether a text begins with the beginning-of-text token, if the file does not say."""
    name = header.text("tokenizer.ggml.pre", "default")
    cut = _CUTS.get(name)
    if cut is None:
        raise GgufInvalid(f"its pre-tokenizer {shown(name)} is not known; known are {', '.join(_CUTS)}")
    merges = []
    for merge in header.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.takes_whole_words))
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *[pre_tokenizers.Split(Regex(expression), "isolated") for expression in cut.expressions],
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_begin


def _sentence_piece(header: Header, vocabulary: dict[str, int], kinds: Sequence[float]) -> tuple[Tokenizer, bool]:
    """See _byte_level."""
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise header.wrong("tokenizer.ggml.scores")
    unknown = next((token for token, of in zip(vocabulary, kinds, strict=True) if of == _UNKNOWN), None)
    merges = _merges(vocabulary, scores, kinds)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        if unknown is not None
        else models.BPE(vocabulary, merges, byte_fallback=True)
    )
    has_space = header.flag("tokenizer.ggml.add_space_prefix", True)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_space else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_space else steps)
    return tokenizer, True


def _merges(vocabulary: dict[str, int], scores: Sequence[float], kinds: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the tokens by falling score: SentencePiece always merges the
    pair whose token scores highest."""
    by_score = sorted(
        (
            (-score, token)
            for (token, score, of) in zip(vocabulary, scores, kinds, strict=True)
            if of == _NORMAL and len(token) > 1
        ),
        key=lambda entry: entry[0],
    )
    # A token may be as long as the file: what is as long as no other is not looked for.
    lengths = sorted(set(map(len, vocabulary)) - {0})
    known = frozenset(lengths)
    merges = []
    for _, token in by_score:
        for place in takewhile(len(token).__gt__, lengths):
            if len(token) - place in known:
                left, right = token[:place], token[place:]
                if left in vocabulary and right in vocabulary:
                    merges.append((left, right))
    return merges


def _token(header: Header, name: str, tokens: Sequence[str]) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in header.metadata:
        return None
    token_id = header.integer(key)
    if token_id >= len(tokens):
        raise header.wrong(key)
    return tokens[token_id]


def _templates(header: Header) -> dict[str, str]:
    templates = {}
    for key in header.metadata:
        if key == "tokenizer.chat_template":
            templates["default"] = header.text(key)
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = header.text(key)
    return templates
