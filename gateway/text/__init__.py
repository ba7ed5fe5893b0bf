"""One model's text: its chat template, its tokenizer, and the way back from tokens to text.

Everything comes from the files that Hugging Face puts beside a model's weights, or from a GGUF's metadata. Text stays
on this side of the wire: the worker sees token ids alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gateway import openai
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.parsers.tongue import tongue_of
from gateway.text import files, untold
from gateway.text.detokenize import Decoder, Vocabulary
from gateway.text.files import TextInvalid
from gateway.text.infill import Infill
from gateway.text.length import PIECE_CHARS, TooLong, beginnings, fitting, without_end
from gateway.text.messages import as_dict, num_chars, with_arguments_as_text
from gateway.text.panics import as_errors
from gateway.text.pieces import Pieces, freeze_words
from gateway.text.stops import StopStrings
from gateway.text.template import ChatTemplate, TemplateFailure, TemplateInvalid
from gateway.text.together import Together
from gateway.turns import Turns
from policies import settings

__all__ = ["Decoder", "StopStrings", "Text", "TextInvalid"]

HAS_CALLS = attrgetter("calls")
VAST_CHARS = 256 << 10
"""What is longer has a thread of its own: others are read while it is."""
REFUSAL = "Too many long prompts are waiting to be read"

T = TypeVar("T")
U = TypeVar("U")


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
        self._turns = Turns(limits.num_threads, "text", REFUSAL)
        self._vast_turns = Turns(1, "text-vast", REFUSAL)
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
        with files.sound(place):
            tokenizer, variables, sources = files.read(place)
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
            told = [as_dict(message, template) for message in messages]
            if not self.tongue.knows_tools and (tools or any(map(HAS_CALLS, messages))):
                told = untold.told(told, tools or (), template.knows_system)
            try:
                return template.render(told, tools, switches or {})
            except TemplateFailure as failure:
                # Some put the arguments in as they are, and expect them to be text.
                if texts := with_arguments_as_text(told):
                    with contextlib.suppress(TemplateFailure):
                        return template.render(texts, tools, switches or {})
                raise InvalidRequest(str(failure), param="messages") from None

        length = num_chars(messages, tools, switches)
        if not self._is_long(length):
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

        return await self._run(tenant_id, length, render_and_encode)

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
        tenant_id: str = "",
    ) -> list[list[int]]:
        """Token ids of bare prompts, by default with the special tokens that the tokenizer puts around a text.
        ``max_tokens`` of each, as in ``encode_chat``; ``cut_at``: of a longer one so many are its beginning, between
        those special tokens. ``tenant_id``: whose turn is waited for. Raises InvalidRequest, also
        ContextLengthExceeded."""

        def encode(some: Sequence[str]) -> list[list[int]]:
            try:
                if cut_at is not None:
                    return fitting(some, cut_at, self._tokenizer)
                for prompt in some:
                    self._pieces.check_length(prompt, max_tokens)
                return self._pieces.read(some, max_tokens, with_specials)
            except Exception as error:
                raise _unread(error, param) from None

        return await self._by_and_by(tenant_id, prompts, [20 + len(prompt) for prompt in prompts], encode)

    async def bad_words(self, words: Sequence[str], tenant_id: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of words as they stand at the beginning of a text and, where that is another first token, behind a
        space (as in vLLM's ``SamplingParams.update_from_tokenizer``). Raises InvalidRequest."""
        plain = [word.lstrip() or word for word in words]
        read = await self.encode(
            [*plain, *[f" {word}" for word in plain]], False, param="bad_words", tenant_id=tenant_id
        )
        found: dict[tuple[int, ...], None] = {}
        for alone, spaced in zip(read[: len(plain)], read[len(plain) :], strict=True):
            found[tuple(alone)] = None
            if len(spaced) == len(alone) and spaced[:1] != alone[:1]:
                found[tuple(spaced)] = None
        return tuple(word for word in found if word)

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        max_tokens: int,
        param: str,
        cut_at: int | None = None,
        tenant_id: str = "",
    ) -> list[tuple[list[int], int]]:
        """Token ids of two texts in one, as the tokenizer joins them, and where the second begins; 0 where the
        tokenizer does not say. ``max_tokens`` of either, as in ``encode_chat``; ``cut_at``: of both together so many
        are read. Raises InvalidRequest."""

        def encode(some: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
            texts = list({text for pair in some for text in pair})
            try:
                if cut_at is not None:
                    begun = dict(zip(texts, beginnings(texts, cut_at, self._tokenizer), strict=True))
                    some = [(begun[first], begun[second]) for first, second in some]
                else:
                    for text in texts:
                        self._pieces.check_length(text, max_tokens)
                with as_errors():
                    encodings = self._tokenizer.encode_batch(list(some), add_special_tokens=True)
            except Exception as error:
                raise _unread(error, param) from None
            read: list[tuple[list[int], int]] = []
            for each in encodings:
                ids = each.ids if cut_at is None else without_end(each, cut_at)
                second_at = each.type_ids.index(1) if 1 in each.type_ids else 0
                read.append((ids, second_at if second_at < len(ids) else 0))
            return read

        nums_chars = [40 + len(first) + len(second) for first, second in pairs]
        return await self._by_and_by(tenant_id, pairs, nums_chars, encode)

    async def cut(self, texts: Sequence[str], max_tokens: int, tenant_id: str = "") -> list[str]:
        """The beginnings of these texts that have so many tokens. Raises InvalidRequest."""

        def cut(some: Sequence[str]) -> list[str]:
            try:
                return beginnings(some, max_tokens, self._tokenizer)
            except Exception as error:
                raise _unread(error, "prompt") from None

        return await self._by_and_by(tenant_id, texts, [20 + len(text) for text in texts], cut)

    async def encode_infill(
        self, prompts: Sequence[str], suffix: str, max_tokens: int | None, tenant_id: str
    ) -> tuple[list[list[int]], tuple[int, ...]]:
        """Token ids of prompts that end where something is to be filled in before ``suffix``, and what ends that;
        ``max_tokens`` of each part, as in ``encode_chat``. Raises InvalidRequest, also where the model has no tokens
        for it."""
        infill = self._infill
        if infill is None:
            what = "this model has no tokens for filling in the middle"
            raise InvalidRequest(f"'suffix' is not supported: {what}", param="suffix", code="unsupported_parameter")
        *before, after = await self.encode([*prompts, suffix], False, max_tokens, tenant_id=tenant_id)
        if self.vocabulary.strips_space:
            # Such a tokenizer has a text begin with a space; what follows the hole begins as it stands (Code Llama).
            line, behind = await self.encode(["\n", f"\n{suffix}"], False, max_tokens, tenant_id=tenant_id)
            after = behind[len(line) :] if behind[: len(line)] == line else after
        ((*lead,),) = await self.encode([""], tenant_id=tenant_id)
        # Whatever comes behind a text has no place here.
        lead = lead if len(lead) == 1 else []
        return [infill.prompt(lead, each, after) for each in before], infill.end_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        return self._tokenizer.decode(token_ids)

    async def decoded(self, token_ids: Sequence[int], tenant_id: str = "") -> str:
        """The text of however many tokens, special ones by their names. Raises ServiceUnavailable."""
        if not self._is_long(len(token_ids)):
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        # Unlike decode() this lets other threads run.
        decode = partial(self._tokenizer.decode_batch, [token_ids], skip_special_tokens=False)
        (text,) = await self._run(tenant_id, len(token_ids), decode)
        return text

    async def token_texts(self, token_ids: Sequence[int], tenant_id: str = "") -> list[str]:
        """Each token by itself, of however many. Raises ServiceUnavailable."""

        def read() -> list[str]:
            return [self.vocabulary.token_text(token_id) for token_id in token_ids]

        return await self._run(tenant_id, len(token_ids), read) if self._is_long(len(token_ids)) else read()

    def decoder(self, continues: bool = False) -> Decoder:
        """For one answer, fed as its tokens arrive. ``continues``: the answer goes on from the prompt's own text, so
        that a first space is part of it."""
        return self.vocabulary.decoder(continues)

    def _is_long(self, num_chars: int) -> bool:
        """Short texts are read on the loop; a long one would hold up every stream, so it goes to a thread."""
        return num_chars > self._inline_chars

    async def _by_and_by(
        self, tenant_id: str, texts: Sequence[T], nums_chars: Sequence[int], read: Callable[[Sequence[T]], list[U]]
    ) -> list[U]:
        """What is read of each. Many that are long together are read some at a time, so that whoever comes with a long
        one meanwhile waits for no more than those."""
        if not self._is_long(sum(nums_chars)):
            return read(texts)
        found: list[U] = []
        while len(found) < len(texts):
            begin = end = len(found)
            num_chars = 0
            while end < len(texts) and (end == begin or num_chars + nums_chars[end] <= PIECE_CHARS):
                num_chars += nums_chars[end]
                end += 1
            found += await self._run(tenant_id, num_chars, partial(read, texts[begin:end]))
        return found

    async def _run(self, tenant_id: str, num_chars: int, read: Callable[[], T]) -> T:
        turns = self._turns if num_chars <= VAST_CHARS else self._vast_turns
        return await turns.run(tenant_id, read)


def _unread(error: Exception, param: str) -> InvalidRequest:
    """A tokenizer without an unknown token refuses some texts, with no exception narrower than Exception."""
    if isinstance(error, TooLong):
        return ContextLengthExceeded.of(
            error.max_tokens, error.num_tokens, param, "There may be more tokens: not all was read."
        )
    return InvalidRequest(f"The prompt cannot be tokenised: {error}")
