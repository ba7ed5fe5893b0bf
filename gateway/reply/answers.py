"""All choices of one request, as one JSON body or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET

from gateway import openai
from gateway.errors import RequestFailed
from gateway.head import whole_id
from gateway.parsers import Parser, Said
from gateway.reply import long
from gateway.reply.choices import ChatLogprobs, Choice, CompletionLogprobs, Logprobs
from gateway.reply.predicted import Predicted
from gateway.reply.shapers import Chunked, Shaper
from gateway.text import Text
from policies import terms, wire
from policies.priority import Order
from policies.terms import total
from policies.upstreams.counting import CountedBy

if TYPE_CHECKING:
    from gateway.dispatch import Dispatch
    from gateway.flight import Flight
    from gateway.pieces import Counted

encode = msgspec.json.encode
LONG_NUMBERS = 1024
_PREDICTED = attrgetter("submit.predicted_token_ids")


class Part:
    """One prompt of the request, as it was submitted, and the choices that answer it."""

    choice_type: type[Choice] = Choice
    is_told = False
    """By an upstream."""
    identity = ""
    """Of what the answer depends on beside what is submitted."""

    def __init__(self, submit: wire.Submit, preamble: str = "") -> None:
        """``preamble``: the prompt's text where it is part of the answer (``echo``)."""
        self.submit = submit
        self.preamble = preamble
        self.flight: Flight | None = None
        """The one that computes it; None: another request's does, or none."""
        self.choices: list[Choice] = []

    def num_cached_tokens(self) -> int:
        """Of its prompt. Siblings share one prefill, so the lowest count is what was found before it began."""
        if len(self.choices) == 1:
            return self.choices[0].num_cached_tokens or 0
        counts = [choice.num_cached_tokens for choice in self.choices if choice.num_cached_tokens is not None]
        return min(counts, default=0)

    def launch(
        self, dispatch: Dispatch, model: str, submit: wire.Submit, order: Order, after: Flight | None = None
    ) -> Flight:
        """As ``Dispatch.submit``."""
        flight = self.flight = dispatch.submit(model, submit, order, after)
        return flight

    def usage(self) -> terms.Usage:
        """So far, where an upstream tells it."""
        raise NotImplementedError

    def upstream(self) -> str | None:
        """The one that answers."""
        return None

    def counted(self) -> Counted | None:
        """What it used at an upstream, once that is known."""
        return None


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
        call: openai.ChatRequest | openai.CompletionRequest | openai.Reading,
        parts: Sequence[Part],
        text: Text,
        fingerprint: str,
        service_tier: str,
        parsers: Callable[[], Parser] | None = None,
    ) -> None:
        """``service_tier``: the one that serves it. ``parsers``: makes one for each choice, where they need one."""
        self.call = call
        self.service_tier = service_tier
        self.id = self._id_prefix + whole_id(parts[0].submit.request_id).removeprefix("req_")
        self.created = int(time.time())
        """Unix seconds."""
        self.fingerprint = fingerprint
        self.parts = {part.submit.request_id: part for part in parts}
        self.choices: list[Choice] = []
        self._is_told = parts[0].is_told
        for part in parts:
            for _ in range(part.submit.num_sequences):
                choice = part.choice_type(
                    len(self.choices),
                    text.decoder(self._continues),
                    call.stops,
                    self._logprobs(text.vocabulary) if part.submit.sampling.num_logprobs is not None else None,
                    part.preamble,
                    not call.stream,
                    None if parsers is None else parsers(),
                    call.keeps_stop,
                    part.submit.sampling.min_tokens,
                )
                part.choices.append(choice)
                self.choices.append(choice)
        self.num_open = len(self.choices)
        """Sequences whose end the worker has not reported."""
        self.num_unfinished = len(self.choices)
        """Choices whose text has not ended."""
        self.num_tokens = 0
        """Of all completions, so far."""
        self._num_drafted_tokens = self._num_accepted_tokens = 0
        """Of those sequences that have ended."""
        self._said_ids: dict[int, list[int]] | None = None
        """What each choice said, where a client predicted it or somebody wants to have it all at the end."""
        self._text = text
        if any(map(_PREDICTED, parts)):
            self._said_ids = {choice.index: [] for choice in self.choices}
        self._usage: terms.Usage | None = None
        """As last counted; None when more has come since."""

    def take(self, delta: wire.Delta) -> Choice:
        """The choice that moved. Raises RequestFailed when the worker gave the sequence up."""
        choice = self.parts[delta.request_id].choices[delta.index]
        was_unfinished, num_before = choice.finish_reason is None, choice.num_tokens
        choice.take(delta)
        num_new = choice.num_tokens - num_before
        self.num_tokens += num_new
        if self._said_ids is not None:
            self._said_ids[choice.index] += delta.token_ids[:num_new]
        self._usage = None
        if was_unfinished and choice.finish_reason is not None:
            self.num_unfinished -= 1
        if delta.finish is not None:
            self.num_open -= 1
            self._num_drafted_tokens += delta.finish.num_drafted_tokens
            self._num_accepted_tokens += delta.finish.num_accepted_tokens
            if choice.finish_reason not in terms.ANSWERED:
                raise RequestFailed("The model failed while answering this request.")
        return choice

    def remember(self) -> None:
        """All that it says, for ``said``; before anything is."""
        self._said_ids = self._said_ids or {choice.index: [] for choice in self.choices}

    def said(self, choice: Choice) -> str:
        """The whole of what a choice said, as it was written; of an answer that was told to ``remember``."""
        if self._is_told:
            return choice.whole()
        return "" if self._said_ids is None else self._text.decode(self._said_ids[choice.index])

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends its text early: the stop strings, and the first call of these names where one call is all."""
        if self._is_told:  # and ends as it may elsewhere
            return (*self.call.stops, "\0", *[part.identity for part in self.parts.values()])
        tools = self.call.tooling() if isinstance(self.call, openai.ChatRequest) else None
        if tools is None or tools.several:
            return self.call.stops
        return (*self.call.stops, "\0", *sorted(function.name for function in tools.functions))

    def usage(self) -> terms.Usage:
        """So far. A prompt counts once, however many answers it has."""
        if self._usage is not None:
            return self._usage
        if self._is_told:
            self._usage = total([part.usage() for part in self.parts.values()])
            return self._usage
        num_prompt_tokens = num_cached_tokens = 0
        for part in self.parts.values():
            num_prompt_tokens += len(part.submit.prompt_token_ids)
            num_cached_tokens += part.num_cached_tokens()
        self._usage = terms.Usage(
            num_prompt_tokens,
            num_cached_tokens,
            self.num_tokens,
            sum([choice.num_reasoning_tokens for choice in self.choices]),
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_predicted_tokens=0 if self._said_ids is None or self.num_open else self._num_predicted_tokens(),
        )
        return self._usage

    @property
    def num_unsent_prompt_tokens(self) -> int:
        """Of prompts that no worker has been given; none where another request's flights bring the answer."""
        parts = self.parts.values()
        if all(part.flight is None for part in parts):
            return 0
        unsent = [part.submit for part in parts if part.flight is None or not part.flight.were_sent]
        return sum([len(submit.prompt_token_ids) for submit in unsent])

    def _num_predicted_tokens(self) -> int:
        assert self._said_ids is not None
        num = 0
        for part in filter(_PREDICTED, self.parts.values()):
            predicted = Predicted(part.submit.predicted_token_ids)
            num += sum([predicted.num_true(self._said_ids[choice.index]) for choice in part.choices])
        return num

    @property
    def upstream(self) -> str | None:
        """The one that answers; None where a worker or a cache does."""
        return (
            next((name for part in self.parts.values() if (name := part.upstream())), None) if self._is_told else None
        )

    @property
    def counted_by(self) -> CountedBy | None:
        """Whose count its usage is, where an upstream answers."""
        if self.upstream is None:
            return None
        counts = [part.counted() for part in self.parts.values()]
        return "upstream" if all(count is not None and count.by == "upstream" for count in counts) else "gateway"

    def finish_reason(self) -> str:
        """How the answer ended; for choices that ended differently, each way once."""
        reasons = [choice.ended_as or "" for choice in self.choices]
        return reasons[0] if len(reasons) == 1 else ",".join(dict.fromkeys(reasons))

    def chunks(self) -> openai.Chunks:
        """Its events, as bytes."""
        return self._chunks(
            id=self.id,
            created=self.created,
            model=self.call.model,
            service_tier=self.service_tier,
            fingerprint=self.fingerprint,
            num_choices=len(self.choices),
            usage=self.call.includes_usage,
            obfuscates=self.call.obfuscates,
        )

    def limit_headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The dialect's names for ``x-ratelimit-*``."""
        return headers

    def shaper(self) -> Shaper:
        """Makes a stream of it."""
        return Chunked(self.chunks(), self.usage if self.call.includes_usage else None)

    @property
    def is_long(self) -> bool:
        """Its body is a matter for ``long.body_of``: it has many numbers."""
        sampling = next(iter(self.parts.values())).submit.sampling
        if sampling.num_logprobs is None:
            return False
        num_tokens = self.num_tokens
        if sampling.num_prompt_logprobs is not None:
            num_tokens += self.usage().num_prompt_tokens
        return num_tokens * (1 + sampling.num_logprobs) > LONG_NUMBERS

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        """The whole as JSON."""
        raise NotImplementedError


class ChatAnswer(Answer):
    """To /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    _chunks = openai.ChatChunks
    _logprobs = ChatLogprobs
    _id_prefix = "chatcmpl-"
    _continues = False

    @property
    def _is_legacy(self) -> bool:
        """The request spoke of ``functions``."""
        return isinstance(self.call, openai.ChatRequest) and bool(self.call.functions)

    @property
    def _tells_reasoning(self) -> bool:
        return not isinstance(self.call, openai.ChatRequest) or self.call.include_reasoning is not False

    def chunks(self) -> openai.Chunks:
        chunks = super().chunks()
        if isinstance(chunks, openai.ChatChunks):
            chunks.is_legacy, chunks.tells_reasoning = self._is_legacy, self._tells_reasoning
        return chunks

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        whole = self.completion()
        return encode(whole if extras is None else msgspec.structs.replace(whole, penstock=extras))

    def completion(self) -> openai.ChatCompletion:
        """The whole; can be had once."""
        is_legacy, choices = self._is_legacy, []
        for choice in self.choices:
            ended_as = "function_call" if is_legacy and choice.ended_as == "tool_calls" else choice.ended_as or "stop"
            message = openai.AnswerMessage.of(self._said(choice), is_legacy, self._tells_reasoning)
            choices.append(openai.ChatChoice(choice.index, message, self._logprobs_of(choice), ended_as))
        return openai.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.call.model,
            choices=choices,
            usage=openai.UsageBody.of(self.usage()),
            service_tier=self.service_tier,
            system_fingerprint=self.fingerprint,
        )

    def _said(self, choice: Choice) -> Said:
        return choice.said()

    def _logprobs_of(self, choice: Choice) -> openai.ChatLogprobs | None:
        return cast("openai.ChatLogprobs | None", long.logprobs(choice))


class TextAnswer(Answer):
    """To /v1/completions."""

    endpoint = "/v1/completions"
    _chunks = openai.CompletionChunks
    _logprobs = CompletionLogprobs
    _id_prefix = "cmpl-"
    _continues = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._likelihood = [0.0] * len(self.choices)
        """The sum of its tokens' log-probabilities, of each, where not all are given."""

    def take(self, delta: wire.Delta) -> Choice:
        call = self.call
        assert isinstance(call, openai.CompletionRequest)
        part = self.parts[delta.request_id]
        if delta.prompt_logprobs is not None:
            for choice in part.choices:
                if choice.logprobs is not None:
                    choice.logprobs.add_prompt(part.submit.prompt_token_ids, delta.prompt_logprobs, part.preamble)
        if call.max_tokens == 0:  # the token that was computed all the same is nobody's, be it one that ends a text
            finish = delta.finish and msgspec.structs.replace(delta.finish, reason="length", has_end_token=False)
            delta = msgspec.structs.replace(delta, token_ids=[], logprobs=None, finish=finish)
        num_before = part.choices[delta.index].num_tokens
        choice = super().take(delta)
        if call.chooses and delta.logprobs is not None:  # of a token behind a stop string nothing counts
            num_new = choice.num_tokens - num_before
            self._likelihood[choice.index] += sum([told.logprob for told in delta.logprobs[:num_new]])
        return choice

    def _given(self) -> Iterator[Choice]:
        """Of each prompt's, those that are likeliest by the token, where not all are given."""
        assert isinstance(self.call, openai.CompletionRequest)
        if not self.call.chooses:
            yield from self.choices
            return
        for part in self.parts.values():
            yield from sorted(
                part.choices,
                key=lambda choice: self._likelihood[choice.index] / max(1, choice.num_tokens),
                reverse=True,
            )[: self.call.num_choices]

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        assert isinstance(self.call, openai.CompletionRequest)
        is_told = self.call.logprobs is not None
        choices = [
            openai.CompletionChoice(
                index,
                choice.pending,
                cast(openai.CompletionLogprobs | None, long.logprobs(choice)) if is_told else None,
                choice.finish_reason or "stop",
            )
            for index, choice in enumerate(self._given())
        ]
        return encode(
            openai.Completion(
                id=self.id,
                created=self.created,
                model=self.call.model,
                choices=choices,
                usage=openai.UsageBody.of(self.usage()),
                system_fingerprint=self.fingerprint,
                penstock=extras or UNSET,
            )
        )
