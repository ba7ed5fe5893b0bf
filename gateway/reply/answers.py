"""All choices of one request, as one JSON body or as events."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from gateway import openai
from gateway.errors import RequestFailed
from gateway.reply.choices import ChatLogprobs, Choice, CompletionLogprobs, Logprobs
from gateway.text import Text
from policies import terms, wire

encode = msgspec.json.encode


class Part:
    """One prompt of the request, as it was submitted: its choices are ``first_index`` and those after."""

    def __init__(self, submit: wire.Submit, first_index: int = 0, preamble: str = "") -> None:
        """``preamble``: the prompt's text where it is part of the answer (``echo``)."""
        self.submit = submit
        self.first_index = first_index
        self.preamble = preamble
        self.num_cached_tokens: int | None = None
        """Of its prompt; None until a sequence has finished."""


class Answer:
    """What the worker's deltas add up to. Subclasses give it one of OpenAI's shapes."""

    endpoint: str
    _chunks: type[openai.Chunks]
    _logprobs: type[Logprobs]
    _id_prefix: str
    _continues: bool
    """The answer's text goes on from the prompt's."""

    def __init__(
        self,
        call: openai.ChatRequest | openai.CompletionRequest,
        parts: Sequence[Part],
        text: Text,
        fingerprint: str,
    ) -> None:
        self.call = call
        self.id = self._id_prefix + parts[0].submit.request_id.removeprefix("req_").partition("-")[0]
        self.created = int(time.time())
        """Unix seconds."""
        self.fingerprint = fingerprint
        self.parts = {part.submit.request_id: part for part in parts}
        self.choices: list[Choice] = []
        for part in parts:
            for _ in range(part.submit.num_sequences):
                logprobs = self._logprobs(text.vocabulary) if part.submit.sampling.num_logprobs is not None else None
                self.choices.append(Choice(text.decoder(self._continues), call.stops, logprobs))
        self.num_open = len(self.choices)
        """Sequences whose end the worker has not reported."""
        self.num_unfinished = len(self.choices)
        """Choices whose text is not complete."""

    def take(self, delta: wire.Delta) -> tuple[int, str]:
        """The choice that moved and the text that it gained. Raises RequestFailed when the worker gave the sequence
        up."""
        part = self.parts[delta.request_id]
        index = part.first_index + delta.index
        choice = self.choices[index]
        was_finished = choice.finish_reason is not None
        text = choice.take(delta)
        finish = delta.finish
        if finish is not None:
            self.num_open -= 1
            # The siblings of a request share one prefill: the first one's count is what was found before it.
            if part.num_cached_tokens is None or finish.num_cached_tokens < part.num_cached_tokens:
                part.num_cached_tokens = finish.num_cached_tokens
        if choice.finish_reason is not None and not was_finished:
            if choice.finish_reason not in ("stop", "length"):
                raise RequestFailed("The model failed while answering this request.")
            self.num_unfinished -= 1
        return index, text

    def preamble(self, index: int) -> str:
        """Text that stands before the choice's own."""
        return next(
            (part.preamble for part in reversed(self.parts.values()) if index >= part.first_index),
            "",
        )

    def usage(self) -> terms.Usage:
        """So far. A prompt counts once, however many answers it has."""
        return terms.Usage(
            num_prompt_tokens=sum(len(part.submit.prompt_token_ids) for part in self.parts.values()),
            num_cached_tokens=sum(part.num_cached_tokens or 0 for part in self.parts.values()),
            num_completion_tokens=sum(choice.num_tokens for choice in self.choices),
        )

    def finish_reason(self) -> str | None:
        """How the answer ended; for choices that ended differently, each way once."""
        reasons = dict.fromkeys(choice.finish_reason for choice in self.choices if choice.finish_reason is not None)
        return ",".join(reasons) or None

    def chunks(self) -> openai.Chunks:
        """Its events."""
        return self._chunks(
            id=self.id,
            created=self.created,
            model=self.call.model,
            fingerprint=self.fingerprint,
            num_choices=len(self.choices),
            usage=self.call.includes_usage,
        )

    def body(self, texts: Sequence[str]) -> bytes:
        """The whole as JSON; ``texts`` by choice."""
        raise NotImplementedError


class ChatAnswer(Answer):
    """To /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    _chunks = openai.ChatChunks
    _logprobs = ChatLogprobs
    _id_prefix = "chatcmpl-"
    _continues = False

    def body(self, texts: Sequence[str]) -> bytes:
        choices = [
            openai.ChatChoice(i, openai.AnswerMessage(text), choice.take_logprobs(), choice.finish_reason or "stop")
            for i, (choice, text) in enumerate(zip(self.choices, texts, strict=True))
        ]
        return encode(
            openai.ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.call.model,
                choices=choices,
                usage=openai.UsageBody.of(self.usage()),
                system_fingerprint=self.fingerprint,
            )
        )


class TextAnswer(Answer):
    """To /v1/completions."""

    endpoint = "/v1/completions"
    _chunks = openai.CompletionChunks
    _logprobs = CompletionLogprobs
    _id_prefix = "cmpl-"
    _continues = True

    def body(self, texts: Sequence[str]) -> bytes:
        choices = [
            openai.CompletionChoice(i, text, choice.take_logprobs(), choice.finish_reason or "stop")
            for i, (choice, text) in enumerate(zip(self.choices, texts, strict=True))
        ]
        return encode(
            openai.Completion(
                id=self.id,
                created=self.created,
                model=self.call.model,
                choices=choices,
                usage=openai.UsageBody.of(self.usage()),
                system_fingerprint=self.fingerprint,
            )
        )
