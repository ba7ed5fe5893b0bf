"""Streams in the bytes of a dialect: what the shapers of all dialects have in common, and that of OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway import errors, failures, openai
from gateway.parsers import Content, Event
from gateway.reply.choices import Choice
from policies import terms


class Shaper(Protocol):
    """One stream, from an answer's choices to the bytes of one dialect. What it returns may be empty: then nothing is
    sent."""

    def moved(self, choice: Choice) -> bytes:
        """What a choice has to say since the last call, its end included; ``opened`` and ``closed`` of the choice are
        the shaper's. The last call for each choice is after its text has ended."""

    def last(self, extras: openai.PenstockExtras | None) -> bytes:
        """The end of a whole stream; it is paid for by now. ``extras``: the receipt, where one was asked for."""

    def failed(self, failure: errors.GatewayError) -> bytes:
        """The end of a stream that failed after its first byte."""


class Chunked:
    """OpenAI's chunks, of chats and of completions."""

    def __init__(self, chunks: openai.Chunks, usage: Callable[[], terms.Usage] | None) -> None:
        """``usage``: of the whole, where the client wants it."""
        self._chunks = chunks
        self._usage = usage

    def moved(self, choice: Choice) -> bytes:
        if choice.is_plain and choice.opened and choice.finish_reason is None:
            text, choice.pending = choice.pending, ""
            return self._chunks.text(choice.index, text) if text else b""
        return self._pieces_of(choice)

    def _pieces_of(self, choice: Choice) -> bytes:
        """Each piece a chunk; the first one has the log-probabilities."""
        chunks, index, said = self._chunks, choice.index, self._events_of(choice)
        ended_as = choice.ended_as
        events = []
        if not choice.opened and (choice.has_text_alone or said or ended_as is not None):
            choice.opened = True
            is_text = choice.has_text_alone or (bool(said) and isinstance(said[0], Content))
            events.append(chunks.opening(index, "" if is_text else None))
        logprobs = self._logprobs_of(choice) if said or ended_as is not None or choice.has_text_alone else None
        if logprobs is not None and not said:
            events.append(chunks.only_logprobs(index, logprobs))
        for event in said:
            events.append(chunks.piece(index, event, logprobs))
            logprobs = None
        if ended_as is not None and not choice.closed:
            choice.closed = True
            events.append(chunks.finish(index, ended_as))
        return b"".join(events)

    def _events_of(self, choice: Choice) -> list[Event]:
        return choice.take_events()

    def _logprobs_of(self, choice: Choice) -> openai.Logprobs | None:
        return choice.take_logprobs()

    def last(self, extras: openai.PenstockExtras | None) -> bytes:
        usage = None if self._usage is None else self._usage()
        return self._chunks.last(usage, extras) + self._chunks.done

    def failed(self, failure: errors.GatewayError) -> bytes:
        return self._chunks.failure(failures.detail(failure))
