"""What a model's files say of its text: a directory in Hugging Face layout, or a GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.text.gguf import Described, described
from gateway.text.panics import as_errors
from policies.gguf import GgufInvalid
from policies.terms import printable
from sources import content


class TextInvalid(ValueError):
    """A model's tokenizer or template cannot be used; the message is one sentence for the operator."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


@contextmanager
def sound(place: Path) -> Iterator[None]:
    """What goes wrong with this model's text meanwhile is a TextInvalid: the tokenizers' library raises nothing
    narrower than Exception."""
    try:
        with as_errors():
            yield
    except TextInvalid:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise TextInvalid(f"the tokenizer of {place} cannot be used: {reason}") from None


def read(place: Path) -> Described:
    """The tokenizer, the special tokens and the templates. Raises TextInvalid."""
    return _of_gguf(place) if place.is_file() else _of_directory(place)


def _of_gguf(path: Path) -> Described:
    try:
        return described(path)
    except (OSError, GgufInvalid) as error:
        raise TextInvalid(f"{path} cannot be read as GGUF: {error}") from None


def _of_directory(directory: Path) -> Described:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TextInvalid(f"{directory} has no tokenizer.json, so its text cannot be read")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TextInvalid(f"{path} cannot be read as a tokenizer: {error}") from None
    config = _json_object(directory / "tokenizer_config.json")
    named = config
    if "added_tokens_decoder" not in config:  # older ones have the special tokens' names in a file of their own
        named = config | _json_object(directory / "special_tokens_map.json")
    variables = {name: content for name, value in named.items() if (content := _special_token(name, value)) is not None}
    return Described(tokenizer, variables, _sources(directory, config))


def _sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates' texts by name. Those in the configuration count where there is no file for the one that is
    meant for all conversations, and no file of their name."""
    sources: dict[str, str] = {}
    default = directory / "chat_template.jinja"
    match None if default.is_file() else config.get("chat_template"):
        case str(source):
            sources["default"] = source
        case list(named):
            for entry in named:
                if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                    sources[entry["name"]] = str(entry.get("template", ""))
    paths = {"default": default}
    paths |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, path in paths.items():
        if path.is_file():
            try:
                sources[name] = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TextInvalid(f"{path} cannot be read: {error}") from None
    return sources


def _special_token(name: str, value: object) -> str | None:
    """ "bos_token" and its like: a string, or an object that describes the token."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none."""
    try:
        value = json.loads(content(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TextInvalid(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TextInvalid(f"{path} holds no JSON object")
    return value
