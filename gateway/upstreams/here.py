"""A request of a model's upstreams that workers of this gateway answer: before them, while its turn may still come in
time, or in their place, where none of them answers. What the workers write is told as an upstream would tell it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from gateway import errors, openai
from gateway.clock import Clock
from gateway.flight import Flight
from gateway.flights import launched
from gateway.head import part_ids
from gateway.parsers import Content, Reasoning, ToolArguments, ToolCallBegin, ToolInput
from gateway.pieces import Counted, Piece
from gateway.reply.answers import Answer
from gateway.reply.choices import Choice
from gateway.reply.vectors import Scored, VectorAnswer
from gateway.stays import stays_of
from gateway.upstreams.call import Call
from policies import wire
from policies.answers import Word
from policies.priority import Order

if TYPE_CHECKING:
    from gateway.dispatch import Dispatch

LAST_WORD_S = 3.0
"""So long it is waited for what the workers had spent on what was broken off."""
TO_UPSTREAMS = (errors.QueueTimeout, errors.ServiceUnavailable, errors.WorkerLost)
"""What ends it here, and lets upstreams be asked as long as nothing was said."""
SAYS_NOTHING = Word("content", "")
"""A token whose text is held, or belongs to another word."""

Ready = tuple[Answer, Order]


class Here:
    """How it would be answered by a model that is served here."""

    def __init__(self, dispatch: Dispatch, prepare: Callable[[], Awaitable[Ready]], ready: Ready | None = None) -> None:
        """``prepare``: as far as it goes before it is sent; ``ready``: that was done."""
        self._dispatch = dispatch
        self._prepare = prepare
        self._ready = ready

    async def prepare(self) -> None:
        """So that it can be launched. Raises what refuses it."""
        self._ready = self._ready or await self._prepare()

    def launch(self, call: Call) -> None:
        """Sends it to a worker or lets it wait in line, once it is prepared. Raises what ``Dispatch.submit`` does."""
        assert self._ready is not None
        answer, order = self._ready
        request, parts = call.request, list(answer.parts.values())
        for request_id, part in zip(part_ids(request.request_id, len(parts)), parts, strict=True):
            part.submit = msgspec.structs.replace(part.submit, request_id=request_id, traceparent=request.traceparent)
        answer.parts = {part.submit.request_id: part for part in parts}

        def sent(submit: wire.Submit, after: Flight | None) -> Flight:
            return answer.parts[submit.request_id].launch(self._dispatch, answer.call.model, submit, order, after)

        call.source = launched(sent, [part.submit for part in parts])

    async def bring(self, call: Call, clock: Clock) -> None:
        """All of the answer, as it comes. Raises what ends it."""
        source = call.source
        assert source is not None
        assert self._ready is not None
        answer, _ = self._ready
        telling = Telling(answer, call)
        try:
            while answer.num_open:
                for delta in await source.deltas():
                    num_unfinished = answer.num_unfinished
                    choice = answer.take(delta)
                    if answer.num_unfinished < num_unfinished and choice.finish is None:
                        source.cancel(delta.request_id, delta.index)
                    for piece in telling.told(choice, delta):
                        if call.is_open(piece.index):
                            call.arrive(piece, clock.now())
        finally:
            source.close()
            if source.were_sent and not source.is_over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORD_S):
                        await source.over()
            if call.request.traceparent and isinstance(source, Flight):
                call.stays = [*(call.stays or ()), *stays_of(source)]


class Telling:
    """One answer of workers in the words of an upstream: as many of them as there are tokens."""

    def __init__(self, answer: Answer, call: Call) -> None:
        self._answer = answer
        self._request_id = call.request.request_id
        self._num_words = [0] * len(answer.choices)
        self._num_chars = [0] * len(answer.choices)
        """Of the content of each."""
        self._stopped: set[int] = set()
        """Those whose stop string was told."""

    def told(self, choice: Choice, delta: wire.Delta) -> Iterator[Piece]:
        """What a choice has moved by; ``delta`` is what moved it."""
        if isinstance(self._answer, VectorAnswer):
            if not self._answer.num_open:
                vectors = _vectors(self._answer)
                for index, vector in enumerate(vectors):
                    finish = wire.Finish("stop", 0, 0, 0.0, 0.0, 0.0)
                    counted = self._counted() if index == len(vectors) - 1 else None
                    yield Piece(self._request_id, index, [], finish=finish, vector=vector, counted=counted)
            return
        index, words, ended = choice.index, self._words(choice), delta.finish
        if ended is not None:
            ended = msgspec.structs.replace(ended, reason=choice.finish_reason or ended.reason)
        if words or ended is not None:
            yield Piece(
                self._request_id,
                index,
                [0] * len(words),
                finish=ended,
                num_cached_tokens=delta.num_cached_tokens,
                words=words,
                counted=None if self._answer.num_open else self._counted(),
            )

    def _counted(self) -> Counted:
        return Counted(self._answer.usage(), "gateway")

    def _words(self, choice: Choice) -> list[Word]:
        words: list[Word] = []
        index, entries = choice.index, _entries(choice.take_logprobs())
        for event in choice.take_events():
            match event:
                case Content(text) if entries:
                    words += _spread(text, self._num_chars[index], entries)
                    self._num_chars[index] += len(text)
                    entries = []
                case Content(text):
                    words.append(Word("content", text))
                    self._num_chars[index] += len(text)
                case Reasoning(text):
                    words.append(Word("reasoning", text))
                case ToolCallBegin(number, call_id, name, is_custom):
                    words.append(Word("custom" if is_custom else "call", name, number, call_id))
                case ToolArguments(number, text):
                    words.append(Word("arguments", text, number))
                case ToolInput(number, text):
                    words.append(Word("input", text, number))
        words += [Word("content", "", logprob=raw) for _, raw in entries]
        num_missing = choice.num_tokens - self._num_words[index] - len(words)
        words += [SAYS_NOTHING] * num_missing  # none where it is less than 0
        self._num_words[index] += len(words)
        if choice.stopped_by is not None and index not in self._stopped:
            self._stopped.add(index)
            words.append(Word("content", choice.stopped_by))  # whoever is told finds it too, and says which it was
        return words


def _spread(text: str, begins_at: int, entries: list[tuple[int | None, bytes]]) -> list[Word]:
    """A text whose first character has the place ``begins_at``, each part with the token that begins there."""
    starts = [0 if at is None else min(max(0, at - begins_at), len(text)) for at, _ in entries]
    if entries[0][0] is None:  # nothing is said of where they begin
        starts = [0, *[len(text)] * (len(entries) - 1)]
    before = [Word("content", text[: starts[0]])] if starts[0] else []
    ends = [*starts[1:], len(text)]
    return before + [
        Word("content", text[start:end], logprob=raw)
        for start, end, (_, raw) in zip(starts, ends, entries, strict=True)
    ]


def _entries(told: openai.Logprobs | None) -> list[tuple[int | None, bytes]]:
    """Each token's place in the text, where it is told, and its entry in the chat form."""
    match told:
        case openai.ChatLogprobs():
            return [(None, msgspec.json.encode(entry)) for entry in told.content or ()]
        case openai.CompletionLogprobs():
            return [
                (at, msgspec.json.encode({"token": token, "logprob": logprob or 0.0, "top_logprobs": _tops(tops)}))
                for at, token, logprob, tops in zip(
                    told.text_offset,
                    told.tokens,
                    told.token_logprobs,
                    told.top_logprobs or [None] * len(told.tokens),
                    strict=True,
                )
            ]
    return []


def _tops(tops: dict[str, float] | None) -> list[dict[str, str | float]]:
    return [{"token": token, "logprob": logprob} for token, logprob in (tops or {}).items()]


def _vectors(answer: VectorAnswer) -> list[bytes]:
    """As an upstream's: a score is a vector of one number."""
    if not isinstance(answer, Scored):
        return answer.vectors()
    scores = [array("f", [score]) for score in answer.scores()]
    if sys.byteorder == "big":
        for score in scores:
            score.byteswap()
    return [score.tobytes() for score in scores]
