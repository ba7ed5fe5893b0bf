"""Answers of upstreams: choices whose text, reasoning and calls come told apart, and whose tokens have no ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from gateway import openai
from gateway.parsers import Content, Event, Reasoning, Refusal, Said, ToolCallBegin, gathered
from gateway.pieces import Counted, Piece, events_of
from gateway.reply.answers import Part
from gateway.reply.choices import ChatLogprobs, Choice
from policies import terms, wire
from policies.answers import Word
from policies.priority import Order
from policies.wire import Delta

if TYPE_CHECKING:
    from gateway.dispatch import Dispatch
    from gateway.flight import Flight

MAX_ENTRY_CHARS = 1000
"""Of one token's text in log-probabilities."""


class Sender(Protocol):
    """Who knows the upstreams of a model and what one of them is to be asked."""

    def __call__(self, submit: wire.Submit, order: Order, is_let_in: bool) -> Flight:
        """As ``Dispatch.submit``; ``is_let_in``: with an earlier prompt of the request."""


class ToldPart(Part):
    """One prompt that an upstream answers."""

    is_told = True

    def __init__(self, submit: wire.Submit, send: Sender, identity: str, choice_type: type[Choice]) -> None:
        """``identity``: of all that the answer depends on."""
        super().__init__(submit)
        self.identity = identity
        self.choice_type = choice_type
        self._send = send

    def launch(
        self, dispatch: Dispatch, model: str, submit: wire.Submit, order: Order, after: Flight | None = None
    ) -> Flight:
        flight = self.flight = self._send(submit, order, after is not None)
        return flight

    def usage(self) -> terms.Usage:
        """As billed so far."""
        if (counted := self.counted()) is not None:
            return counted.usage
        num_tokens = sum([choice.num_tokens for choice in self.choices])
        num_reasoning = sum([choice.num_reasoning_tokens for choice in self.choices])
        return terms.Usage(len(self.submit.prompt_token_ids), self.num_cached_tokens(), num_tokens, num_reasoning)

    def counted(self) -> Counted | None:
        """None until its end."""
        choices = cast(list[ToldChoice], self.choices)
        return next((choice.counted for choice in choices if choice.counted is not None), None)

    def upstream(self) -> str | None:
        choices = cast(list[ToldChoice], self.choices)
        return next((choice.upstream for choice in choices if choice.upstream), None)


class ToldChoice(Choice):
    """One sequence of a conversation's answer."""

    __slots__ = (
        "_entries",
        "_events",
        "_num_calls",
        "_num_chars",
        "_num_reasoning_tokens",
        "_whole",
        "counted",
        "upstream",
    )

    def __init__(self, *parts: Any) -> None:
        """As ``Choice``."""
        super().__init__(*parts)
        self.is_plain = self.has_text_alone and self.logprobs is None
        self.counted: Counted | None = None
        self.upstream = ""
        """Which one answers."""
        self._events: list[Event] = []
        self._entries: list[tuple[bytes, int]] = []
        """Log-probabilities that were not taken, each with where its text begins."""
        self._num_chars = len(self.pending)
        self._num_calls = self._num_reasoning_tokens = 0
        self._whole: list[str] = []

    @property
    def has_text_alone(self) -> bool:
        return False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning_tokens

    @property
    def ended_as(self) -> str | None:
        return "tool_calls" if self.finish_reason == "stop" and self._num_calls else self.finish_reason

    def take_events(self) -> list[Event]:
        """Those of one kind that follow each other as one."""
        taken, self._events = self._events, []
        events: list[Event] = []
        for event in taken:
            last = events[-1] if events else None
            match event:
                case Content(text) if isinstance(last, Content):
                    events[-1] = Content(last.text + text)
                case Reasoning(text) if isinstance(last, Reasoning):
                    events[-1] = Reasoning(last.text + text)
                case Refusal(text) if isinstance(last, Refusal):
                    events[-1] = Refusal(last.text + text)
                case _:
                    events.append(event)
        return events

    def whole(self) -> str:
        return "".join(self._whole)

    def said(self) -> Said:
        return gathered(self.take_events())

    def take(self, delta: Delta) -> None:
        assert isinstance(delta, Piece)
        self.upstream = self.upstream or delta.upstream
        self.counted = delta.counted or self.counted
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if self.finish_reason is None:
            for word in delta.words:
                self._take_word(word)
                if self.finish_reason is not None:
                    break
        if delta.finish is not None:
            self.finish = delta.finish
            if self.finish_reason is None:
                self._say([Content(text)] if (text := self._held()) else [])
                self.finish_reason = delta.finish.reason

    def take_logprobs(self, most: int | None = None) -> openai.Logprobs | None:
        if self.logprobs is None or not self._entries:
            return None
        num = len(self._entries) if most is None else most
        entries, self._entries = self._entries[:num], self._entries[num:]
        read = [(_entry(each), at) for each, at in entries]
        if isinstance(self.logprobs, ChatLogprobs):
            return openai.ChatLogprobs([entry for entry, _ in read])
        return openai.CompletionLogprobs(
            tokens=[entry.token for entry, _ in read],
            token_logprobs=[entry.logprob for entry, _ in read],
            top_logprobs=[{top.token: top.logprob for top in entry.top_logprobs} for entry, _ in read],
            text_offset=[at for _, at in read],
        )

    def _take_word(self, word: Word) -> None:
        self.num_tokens += 1
        self._whole.append(word.text)
        if word.logprob and self.logprobs is not None:
            self._entries.append((word.logprob, self._num_chars))
        if word.kind == "content":
            self._num_chars += len(word.text)
            text = self._through_stops(word.text)
            self._say([Content(text)] if text else [])
            return
        if word.kind == "reasoning":
            self._num_reasoning_tokens += 1
        self._say(events_of([word]))

    def _say(self, events: list[Event]) -> None:
        self._num_calls += sum(isinstance(event, ToolCallBegin) for event in events)
        self._events += events


class ToldText(ToldChoice):
    """One sequence of a text that is gone on with: all of it is content."""

    __slots__ = ()

    @property
    def has_text_alone(self) -> bool:
        return True

    def take_events(self) -> list[Event]:
        text, self.pending = self.pending, ""
        return [Content(text)] if text else []

    def _say(self, events: list[Event]) -> None:
        self.pending += "".join([event.text for event in events if isinstance(event, Content | Reasoning)])


class _Top(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_Top] | None = None


_decode = msgspec.json.Decoder(_Entry).decode


def is_entry(raw: bytes) -> bool:
    """It can be told on."""
    try:
        return len(_decode(raw).token) <= MAX_ENTRY_CHARS
    except msgspec.DecodeError:
        return False


def _entry(raw: bytes) -> openai.ChatLogprob:
    """As ours say it, where some leave out the bytes."""
    entry = _decode(raw)
    return openai.ChatLogprob(
        entry.token,
        entry.logprob,
        _bytes(entry),
        [openai.TopLogprob(top.token, top.logprob, _bytes(top)) for top in entry.top_logprobs or ()],
    )


def _bytes(entry: _Entry | _Top) -> list[int]:
    return list(entry.token.encode("utf-8", "replace")) if entry.bytes is None else entry.bytes
