"""One answer's tokens as text: decoded, cut at a stop string, told apart into content, reasoning and calls where there
may be such, with log-probabilities beside it where asked.

Whoever shapes an answer for a client asks a choice for its events (``take_events``) whenever it has moved, and once it
has ended for ``ended_as``. A choice that ``is_plain`` can be asked for its text instead (``pending``), which is the
shortest way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from gateway import openai
from gateway.parsers import Content, Event, Parser, Said, gathered
from gateway.text import Decoder, StopStrings
from gateway.text.detokenize import Vocabulary
from policies.terms import FinishReason
from policies.wire import Delta, Finish, TokenLogprob

MIN_LOGPROB = -9999.0
"""What JSON says for minus infinity, as OpenAI does."""


Told = tuple[int, int, TokenLogprob | None]
"""Where a token's text begins, its id, and what is told of it; None: it follows nothing."""


class Logprobs:
    """Log-probabilities in one of OpenAI's shapes, given out no earlier than the text of their tokens."""

    tells_ends = False
    """A token that ends an answer is told too, though it says nothing."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pending: list[Told] = []

    def add(self, token_id: int, logprob: TokenLogprob, offset: int) -> None:
        """A token whose text begins at character ``offset`` of the answer."""
        self._pending.append((offset, token_id, logprob))

    def add_prompt(self, token_ids: Sequence[int], scored: Sequence[TokenLogprob], text: str) -> None:
        """Those of a prompt that is the beginning of the answer; ``scored``: of its tokens from the second on;
        ``text``: as the answer has it, in which special tokens may be named."""
        decoder, num_chars = self._vocabulary.decoder(continues=False), 0
        told: list[Told] = []
        for token_id, logprob in zip(token_ids, (None, *scored), strict=True):
            told.append((num_chars, token_id, logprob))
            piece = decoder.feed((token_id,))
            if not piece and text.startswith(name := self._vocabulary.token_text(token_id), num_chars):
                piece = name
            num_chars += len(piece)
        self._pending[:0] = told

    def take(self, num_chars: int, most: int | None = None) -> openai.Logprobs | None:
        """Those of the tokens that begin before character ``num_chars`` and were not taken yet, ``most`` of them; None
        when there are none."""
        num = sum(1 for offset, _, _ in islice(self._pending, most) if offset < num_chars)
        if not num:
            return None
        taken, self._pending = self._pending[:num], self._pending[num:]
        return self._shaped(taken)

    def _shaped(self, tokens: Sequence[Told]) -> openai.Logprobs:
        raise NotImplementedError


class ChatLogprobs(Logprobs):
    """Entries with token, logprob, bytes and the likeliest others."""

    def _shaped(self, tokens: Sequence[Told]) -> openai.ChatLogprobs:
        text, data = self._vocabulary.token_text, self._vocabulary.token_bytes
        return openai.ChatLogprobs(
            [
                openai.ChatLogprob(
                    text(token_id),
                    max(MIN_LOGPROB, logprob.logprob),
                    list(data(token_id)),
                    [
                        openai.TopLogprob(text(top_id), max(MIN_LOGPROB, top), list(data(top_id)))
                        for top_id, top in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
                    ],
                )
                for _, token_id, logprob in tokens
                if logprob is not None
            ]
        )


class CompletionLogprobs(Logprobs):
    """Parallel lists; the likeliest tokens of a position are one object that holds the sampled one too."""

    tells_ends = True
    # Who scores a text by its echo has one token written, whichever it is, and takes the last entry for that one's.

    def _shaped(self, tokens: Sequence[Told]) -> openai.CompletionLogprobs:
        text = self._vocabulary.token_text
        return openai.CompletionLogprobs(
            tokens=[text(token_id) for _, token_id, _ in tokens],
            token_logprobs=[None if told is None else max(MIN_LOGPROB, told.logprob) for _, _, told in tokens],
            top_logprobs=[
                None
                if logprob is None
                else {
                    **{
                        text(top_id): max(MIN_LOGPROB, top)
                        for top_id, top in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
                    },
                    text(token_id): max(MIN_LOGPROB, logprob.logprob),
                }
                for _, token_id, logprob in tokens
            ],
            text_offset=[offset for offset, _, _ in tokens],
        )


class Choice:
    """One sequence's answer. ``take`` is the path of every token."""

    __slots__ = (
        "_decoder",
        "_is_decoded_whole",
        "_keeps_stop",
        "_min_tokens",
        "_num_decoded",
        "_num_given",
        "_parser",
        "_stops",
        "_waiting_ids",
        "closed",
        "finish",
        "finish_reason",
        "index",
        "is_plain",
        "logprobs",
        "num_cached_tokens",
        "num_tokens",
        "opened",
        "pending",
    )

    def __init__(
        self,
        index: int,
        decoder: Decoder,
        stops: Sequence[str] = (),
        logprobs: Logprobs | None = None,
        preamble: str = "",
        at_once: bool = False,
        parser: Parser | None = None,
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """``preamble``: text that comes before the answer's own. ``at_once``: nobody reads before the end, so nothing
        need be decoded before it. ``parser``: None where all text is content. ``keeps_stop``: the stop string that ends
        it is a part of it, and so is the end token's text, where all is content. ``min_tokens``: no stop string ends it
        that begins before there are so many."""
        self.index = index
        self.logprobs = logprobs
        self.pending = preamble
        """Text that may be sent and was not yet; whoever sends it empties it. With a parser there is none."""
        self.is_plain = logprobs is None and parser is None
        """It has text and nothing else."""
        self.num_cached_tokens: int | None = None
        """Of its prompt, as soon as the worker has said so."""
        self.num_tokens = 0
        """Of the completion, as counted by the worker, up to the end of the answer."""
        self.finish_reason: FinishReason | None = None
        """How the text ended: nothing is added to it any more."""
        self.finish: Finish | None = None
        """The worker's own word on how the sequence ended; after a stop string it comes a little later."""
        self.opened = False
        """Its first event is out."""
        self.closed = False
        """Its last event is out."""
        self._decoder = decoder
        self._stops = StopStrings(stops, keeps_stop) if stops else None
        self._keeps_stop = keeps_stop and parser is None
        self._min_tokens = min_tokens
        self._num_decoded = self._num_given = len(preamble)
        self._parser = parser
        self._is_decoded_whole = self._stops is None and self.is_plain
        self._waiting_ids: list[int] | None = [] if at_once and self._is_decoded_whole else None

    @property
    def has_text_alone(self) -> bool:
        """All that it may say is content."""
        return self._parser is None

    @property
    def num_reasoning_tokens(self) -> int:
        """Of the completion."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def ended_as(self) -> str | None:
        """How the text ended, in OpenAI's words: "stop", "length", "tool_calls"; None while it goes on. Calls
        of which a stop string has cut one are not to be acted on."""
        parser = self._parser
        if self.finish_reason != "stop" or parser is None or not parser.num_calls:
            return self.finish_reason
        return "stop" if self.stopped_by is not None and parser.is_in_call else "tool_calls"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.found

    def take_events(self) -> list[Event]:
        """What it said since the last call."""
        if self._parser is not None:
            return self._parser.take()
        text, self.pending = self.pending, ""
        return [Content(text)] if text else []

    def said(self) -> Said:
        """The whole of an answer of which no events were taken."""
        if self._parser is None:
            text, self.pending = self.pending, ""
            return Said(text or None, None, ())
        return gathered(self._parser.take())

    def whole(self) -> str:
        """All that it said, where an upstream says it."""
        raise NotImplementedError

    def take(self, delta: Delta) -> None:
        """Adds what the sequence gained. What is still on its way after a stop string is dropped."""
        token_ids = delta.token_ids
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish is not None:
            self._take_end(delta, delta.finish)
        elif self._waiting_ids is not None:
            self.num_tokens += len(token_ids)
            self._waiting_ids += token_ids
        elif self.finish_reason is not None:
            return
        elif self._is_decoded_whole:
            self.num_tokens += len(token_ids)
            self.pending += self._decoder.feed(token_ids)
        else:
            self._take_each(delta, len(token_ids))

    def take_logprobs(self, most: int | None = None) -> openai.Logprobs | None:
        """Those of the text given out that were not taken yet, ``most`` of them."""
        return None if self.logprobs is None else self.logprobs.take(self._num_given, most)

    def _take_end(self, delta: Delta, finish: Finish) -> None:
        self.finish = finish
        self.num_cached_tokens = finish.num_cached_tokens
        if self.finish_reason is not None:
            return
        token_ids = delta.token_ids
        # The end token is counted and says nothing, unless it was asked for.
        num_texts = len(token_ids) - (finish.has_end_token and not self._keeps_stop)
        if self._is_decoded_whole:
            self.num_tokens += len(token_ids)
            token_ids = (self._waiting_ids or []) + token_ids[:num_texts]
            self.pending += self._decoder.feed(token_ids) + self._decoder.finish()
            self.finish_reason = finish.reason
            return
        self._take_each(delta, num_texts)
        if self.finish_reason is None:
            self.num_tokens += len(token_ids) - num_texts
            if num_texts < len(token_ids) and self.logprobs is not None and self.logprobs.tells_ends:
                assert delta.logprobs is not None
                self.logprobs.add(token_ids[-1], delta.logprobs[-1], self._num_decoded)
            self._pass_on(self._through_stops(self._decoder.finish()))
        if self.finish_reason is None:
            self.finish_reason = finish.reason
            self._pass_on(self._held())
            self._num_given += 1  # tokens without text at the very end begin where the text ends
        if self._parser is not None:
            self._parser.finish(self.finish_reason == "length" or self.stopped_by is not None)

    def _take_each(self, delta: Delta, num_texts: int) -> None:
        """Token by token, as it matters which one completed a stop string and where each one begins."""
        parser = self._parser
        for i, token_id in enumerate(delta.token_ids[:num_texts]):
            self.num_tokens += 1
            if self.logprobs is not None:
                assert delta.logprobs is not None
                self.logprobs.add(token_id, delta.logprobs[i], self._num_decoded)
            text = self._through_stops(self._decoder.feed((token_id,)))
            if parser is None:
                self._pass_on(text)
            else:
                self._num_given += len(text)
                mark = parser.marks.get(token_id)
                if mark is None:
                    parser.feed(text)
                else:
                    self._pass_on(self._held())
                    parser.feed(mark)
                if parser.is_over:
                    self.finish_reason = self.finish_reason or "stop"
                if self.finish_reason is not None:
                    parser.finish(self.stopped_by is not None)
            if self.finish_reason is not None:
                return

    def _through_stops(self, text: str) -> str:
        """As much of the text as the stop strings let through."""
        self._num_decoded += len(text)
        if self._stops is not None and self.num_tokens > self._min_tokens:
            text, stopped = self._stops.feed(text)
            if stopped:
                self.finish_reason = "stop"
        return text

    def _held(self) -> str:
        """What the stop strings held back."""
        return "" if self._stops is None else self._stops.finish()

    def _pass_on(self, text: str) -> None:
        """Text that no token is counted for."""
        self._num_given += len(text)
        if self._parser is None:
            self.pending += text
        elif text:
            self._parser.rest(text)
