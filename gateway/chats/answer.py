"""The answer of a chat that is kept."""

from __future__ import annotations

from typing import Any

from gateway import openai, reply
from gateway.parsers import Event, Said, gathered
from gateway.reply.choices import Choice
from gateway.reply.shapers import Chunked


class KeptAnswer(reply.ChatAnswer):
    """Streamed or not, ``completion`` is the whole of it once it has ended."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.told = Told(self)
        self._whole: openai.ChatCompletion | None = None

    def shaper(self) -> Chunked:
        return Telling(self.chunks(), self.usage if self.call.includes_usage else None, self.told)

    def completion(self) -> openai.ChatCompletion:
        if self._whole is None:
            self._whole = super().completion()
        return self._whole

    def _said(self, choice: Choice) -> Said:
        return gathered([*self.told.events[choice.index], *choice.take_events()])

    def _logprobs_of(self, choice: Choice) -> openai.ChatLogprobs | None:
        rest = choice.take_logprobs()
        entries = [*self.told.logprobs[choice.index], *(rest.content if isinstance(rest, openai.ChatLogprobs) else ())]
        return openai.ChatLogprobs(entries) if entries else None


class Told:
    """What a stream has said of each choice."""

    def __init__(self, answer: reply.Answer) -> None:
        self.events: list[list[Event]] = [[] for _ in answer.choices]
        self.logprobs: list[list[openai.ChatLogprob]] = [[] for _ in answer.choices]


class Telling(Chunked):
    """As every stream of chunks, with a copy of what it says."""

    def __init__(self, chunks: openai.Chunks, usage: Any, told: Told) -> None:
        super().__init__(chunks, usage)
        self._told = told

    def moved(self, choice: Choice) -> bytes:
        return self._pieces_of(choice)

    def _events_of(self, choice: Choice) -> list[Event]:
        said = super()._events_of(choice)
        self._told.events[choice.index] += said
        return said

    def _logprobs_of(self, choice: Choice) -> openai.Logprobs | None:
        logprobs = super()._logprobs_of(choice)
        if isinstance(logprobs, openai.ChatLogprobs):
            self._told.logprobs[choice.index] += logprobs.content
        return logprobs
