"""One model's text: its chat template, its tokenizer, and the way back from tokens to text.

Everything comes from the files that Hugging Face puts beside a model's weights, or from a GGUF's metadata. Text stays
on this side of the wire: the worker sees token ids alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gateway import openai
from gateway.errors import ContextLengthExceeded, InvalidRequest, ServiceUnavailable
from gateway.parsers.tongue import tongue_of
from gateway.text import untold
from gateway.text.detokenize import Decoder, Vocabulary
from gateway.text.gguf import Described, described
from gateway.text.infill import Infill
from gateway.text.length import TooLong, beginnings, fitting
from gateway.text.pieces import Pieces, freeze_words
from gateway.text.stops import StopStrings
from gateway.text.template import ChatTemplate, TemplateFailure, TemplateInvalid
from gateway.text.together import Together
from policies import settings
from policies.gguf import GgufInvalid

__all__ = ["Decoder", "StopStrings", "Text", "TextInvalid"]

HAS_CALLS = attrgetter("calls")
MAX_WAITING = 256
"""Long prompts that wait for a thread before more are refused."""

T = TypeVar("T")


class TextInvalid(ValueError):
    """A model's tokenizer or template cannot be used; the message is one sentence for the operator."""


class Text:
    """Renders, encodes and decodes for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: dict[str, ChatTemplate],
        limits: settings.Text | None = None,
        calls: str = "auto",
        thinking: str = "auto",
    ) -> None:
        """``templates`` by name: "default", and "tool_use" where a model has one for requests with tools. ``calls`` and
        ``thinking``: how it writes them, as ``tongue_of`` takes it."""
        limits = limits or settings.Text()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        freeze_words(tokenizer)
        self._tokenizer = tokenizer
        self._templates = templates
        self._inline_chars = limits.inline_chars
        self._threads = ThreadPoolExecutor(limits.num_threads, thread_name_prefix="text")
        self._num_waiting = 0
        self._pieces = Pieces(tokenizer)
        self._together = Together(self._pieces.read)
        self.vocabulary = Vocabulary(tokenizer)
        self._infill = Infill.of(tokenizer)
        sources = [template.source for template in templates.values()]
        self.tongue = tongue_of(sources, self.vocabulary.added, calls, thinking)

    @classmethod
    def load(
        cls, place: Path, limits: settings.Text | None = None, calls: str = "auto", thinking: str = "auto"
    ) -> Text:
        """From a GGUF file, or a directory with tokenizer.json, tokenizer_config.json and the chat template beside
        them. Raises TextInvalid.
        """
        # One prompt at a time is encoded, so the library's own threads would only cost.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer, variables, sources = _of_gguf(place) if place.is_file() else _of_directory(place)
        try:
            templates = {name: ChatTemplate(source, variables) for name, source in sources.items()}
        except TemplateInvalid as error:
            raise TextInvalid(f"{place}: {error}") from None
        return cls(tokenizer, templates, limits, calls, thinking)

    @property
    def template(self) -> str:
        """The source of the template; empty where the model has none."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        return "" if template is None else template.source

    async def encode_chat(
        self,
        messages: Sequence[openai.Message],
        tools: Sequence[dict[str, Any]] | None = None,
        switches: Mapping[str, Any] | None = None,
        tenant_id: str = "",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the conversation as the model was trained to read it.

        A special token's name in a message's text becomes that token, as it does in transformers. The template writes
        the beginning-of-text token where the model wants one, so none is added. ``switches`` are the template's own.
        What this tenant's conversations held before is not read again, and what is certainly longer than
        ``max_tokens`` is not read to its end. Raises InvalidRequest, also ContextLengthExceeded.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions", param="model")

        def rendered() -> str:
            told = [_as_dict(message, template) for message in messages]
            if not self.tongue.knows_tools and (tools or any(map(HAS_CALLS, messages))):
                told = untold.told(told, tools or ())
            try:
                return template.render(told, tools, switches or {})
            except TemplateFailure as failure:
                # Some put the arguments in as they are, and expect them to be text.
                if texts := _with_arguments_as_text(told):
                    with contextlib.suppress(TemplateFailure):
                        return template.render(texts, tools, switches or {})
                raise InvalidRequest(str(failure), param="messages") from None

        if not self._is_long(_num_chars(messages) + 1000 * len(tools or ())):
            found = self._pieces.find(rendered(), tenant_id)
            read = self._pieces.read_plain(found.missing)
            if read is None:
                try:
                    read = await self._together.read(found.missing)
                except Exception as error:
                    raise _unread(error, "messages") from None
            return self._pieces.join(found, read)

        def render_and_encode() -> list[int]:
            prompt = rendered()
            try:
                return self._pieces.encode(prompt, tenant_id, max_tokens)
            except Exception as error:
                raise _unread(error, "messages") from None

        return await self._on_thread(render_and_encode)

    def is_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the tokens of a chat's prompt end within the model's reasoning."""
        if self.tongue.thinking is None:
            return False
        return self.tongue.is_thinking(self._tokenizer.decode(prompt[-8:], skip_special_tokens=False))

    async def encode(
        self,
        prompts: Sequence[str],
        with_specials: bool = True,
        max_tokens: int | None = None,
        param: str = "prompt",
        cut_at: int | None = None,
    ) -> list[list[int]]:
        """Token ids of bare prompts, by default with the special tokens that the tokenizer puts around a text.
        ``max_tokens`` of each, as in ``encode_chat``; ``cut_at``: of a longer one so many are its beginning, between
        those special tokens. Raises InvalidRequest, also ContextLengthExceeded."""

        def encode() -> list[list[int]]:
            try:
                if cut_at is not None:
                    return fitting(prompts, cut_at, self._tokenizer)
                for prompt in prompts:
                    self._pieces.check_length(prompt, max_tokens)
                return self._pieces.read(prompts, max_tokens, with_specials)
            except Exception as error:
                raise _unread(error, param) from None

        if not self._is_long(sum(20 + len(prompt) for prompt in prompts)):
            return encode()
        return await self._on_thread(encode)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_tokens: int, param: str
    ) -> list[tuple[list[int], int]]:
        """Token ids of two texts in one, as the tokenizer joins them, and where the second begins; 0 where the
        tokenizer does not say. ``max_tokens`` of either, as in ``encode_chat``. Raises InvalidRequest."""

        def read() -> list[tuple[list[int], int]]:
            try:
                for text in {text for pair in pairs for text in pair}:
                    self._pieces.check_length(text, max_tokens)
                encodings = self._tokenizer.encode_batch(list(pairs), add_special_tokens=True)
            except Exception as error:
                raise _unread(error, param) from None
            return [(each.ids, each.type_ids.index(1) if 1 in each.type_ids else 0) for each in encodings]

        if not self._is_long(sum(40 + len(first) + len(second) for first, second in pairs)):
            return read()
        return await self._on_thread(read)

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The beginnings of these texts that have so many tokens. Raises InvalidRequest."""

        def cut() -> list[str]:
            try:
                return beginnings(texts, max_tokens, self._tokenizer)
            except Exception as error:
                raise _unread(error, "prompt") from None

        return await self._on_thread(cut)

    async def encode_infill(
        self, prompts: Sequence[str], suffix: str, max_tokens: int | None = None
    ) -> tuple[list[list[int]], tuple[int, ...]]:
        """Token ids of prompts that end where something is to be filled in before ``suffix``, and what ends that;
        ``max_tokens`` of each part, as in ``encode_chat``. Raises InvalidRequest, also where the model has no tokens
        for it."""
        infill = self._infill
        if infill is None:
            what = "this model has no tokens for filling in the middle"
            raise InvalidRequest(f"'suffix' is not supported: {what}", param="suffix", code="unsupported_parameter")
        *before, after = await self.encode([*prompts, suffix], False, max_tokens)
        ((*lead,),) = await self.encode([""])
        # Whatever comes behind a text has no place here.
        lead = lead if len(lead) == 1 else []
        return [infill.prompt(lead, each, after) for each in before], infill.end_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        return self._tokenizer.decode(token_ids)

    def decoder(self, continues: bool = False) -> Decoder:
        """For one answer, fed as its tokens arrive. ``continues``: the answer goes on from the prompt's own text, so
        that a first space is part of it."""
        return self.vocabulary.decoder(continues)

    def _is_long(self, num_chars: int) -> bool:
        """Short texts are read on the loop; a long one would hold up every stream, so it goes to a thread."""
        return num_chars > self._inline_chars

    async def _on_thread(self, encode: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING:
            raise ServiceUnavailable("Too many long prompts are waiting to be read", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        finally:
            self._num_waiting -= 1


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
    variables = {
        name: content for name, value in config.items() if (content := _special_token(name, value)) is not None
    }
    return Described(tokenizer, variables, _sources(directory, config))


def _unread(error: Exception, param: str) -> InvalidRequest:
    """A tokenizer without an unknown token refuses some texts, with no exception narrower than Exception."""
    if isinstance(error, TooLong):
        return ContextLengthExceeded.of(error.max_tokens, f"{error.num_tokens} or more", param)
    return InvalidRequest(f"The prompt cannot be tokenised: {error}")


def _num_chars(messages: Sequence[openai.Message]) -> int:
    """About how long the rendered conversation will be."""
    num_chars = 0
    for message in messages:
        content = message.content
        num_chars += 20 + len(content if isinstance(content, str) else message.text)
        if message.tool_calls or message.function_call is not None:
            num_chars += sum(100 + len(_text(call.called.arguments)) for call in message.calls)
        if message.reasoning_content:
            num_chars += len(message.reasoning_content)
    return num_chars


def _as_dict(message: openai.Message, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it: text in one string, arguments as an object, and no key without a value."""
    content, role = message.content, message.role
    if message.is_plain and message.name is None:
        return {"role": role, "content": content}
    if role == "developer" and not template.knows_developer:
        role = "system"
    elif role == "function":
        role = "tool"
    entry: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else message.text}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = template.id_of(message.tool_call_id)
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    if message.calls:
        entry["tool_calls"] = [
            {
                "id": template.id_of(call.id or ""),
                "type": "function",
                "function": {"name": called.name, "arguments": _arguments(called.arguments)},
            }
            for call in message.calls
            for called in (call.called,)
        ]
    return entry


def _with_arguments_as_text(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Empty where there are none."""
    has_calls = False
    texts = []
    for message in told:
        if "tool_calls" in message:
            has_calls = True
            calls = [
                call | {"function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = message | {"tool_calls": calls}
        texts.append(message)
    return texts if has_calls else []


def _text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates' texts by name. A file of its own wins over the one in the configuration."""
    sources: dict[str, str] = {}
    match config.get("chat_template"):
        case str(source):
            sources["default"] = source
        case list(named):
            for entry in named:
                if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                    sources[entry["name"]] = str(entry.get("template", ""))
    paths = {"default": directory / "chat_template.jinja"}
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
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TextInvalid(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TextInvalid(f"{path} holds no JSON object")
    return value
