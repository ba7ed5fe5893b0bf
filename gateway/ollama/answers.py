"""One answer in Ollama's shapes: a JSON body, or lines of JSON."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai
from gateway.errors import GatewayError
from gateway.ollama import failures
from gateway.ollama.responses import Call, CalledFunction, ChatBody, GenerateBody, Message, instant
from gateway.parsers import Content, Reasoning, Refusal, ToolArguments, ToolCallBegin
from gateway.reply import Answer, ChatLogprobs, Choice, Shaper

encode = msgspec.json.encode


class OllamaAnswer(Answer):
    """There is one choice."""

    _logprobs = ChatLogprobs
    _id_prefix = "ollama-"

    def __init__(self, *parts: Any, started_at: float) -> None:
        """``started_at``: when the request came, in monotonic seconds."""
        super().__init__(*parts)
        self._started_at = started_at

    def shaper(self) -> Shaper:
        return Lines(self)

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        (choice,) = self.choices
        said = choice.said()
        calls = [whole for call in said.calls if (whole := _call(call.id, call.name, call.arguments)) is not None]
        told = logprobs_of(choice)
        return self.line(said.text, said.reasoning or UNSET, calls or UNSET, logprobs=told, **self.end())

    def end(self) -> dict[str, Any]:
        """What the last line has and no other."""
        (choice,) = self.choices
        usage, finish = self.usage(), choice.finish
        return {
            "done": True,
            "done_reason": "length" if choice.ended_as == "length" else "stop",
            "total_duration": int(1e9 * (time.monotonic() - self._started_at)),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": 0 if finish is None else int(1e9 * finish.prefill_s),
            "eval_count": usage.num_completion_tokens,
            "eval_duration": 0 if finish is None else int(1e9 * finish.decode_s),
        }

    def line(
        self,
        text: str,
        thinking: str | UnsetType = UNSET,
        calls: list[Call] | UnsetType = UNSET,
        *,
        done: bool = False,
        **end: Any,
    ) -> bytes:
        """One object, without the end of the line."""
        model, created_at = self.call.model, instant(time.time())
        return encode(self._shaped(text, thinking, calls, model=model, created_at=created_at, done=done, **end))

    def _shaped(
        self, text: str, thinking: str | UnsetType, calls: list[Call] | UnsetType, **others: Any
    ) -> ChatBody | GenerateBody:
        raise NotImplementedError


class ChatAnswer(OllamaAnswer):
    """To /api/chat."""

    endpoint = "/api/chat"
    _continues = False

    def _shaped(self, text: str, thinking: str | UnsetType, calls: list[Call] | UnsetType, **others: Any) -> ChatBody:
        return ChatBody(message=Message(content=text, thinking=thinking, tool_calls=calls), **others)


class GenerateAnswer(OllamaAnswer):
    """To /api/generate."""

    endpoint = "/api/generate"
    _continues = False

    def _shaped(
        self, text: str, thinking: str | UnsetType, calls: list[Call] | UnsetType, **others: Any
    ) -> GenerateBody:
        return GenerateBody(response=text, thinking=thinking, **others)


class RawAnswer(GenerateAnswer):
    """The same where the answer's text goes on from the prompt's."""

    _continues = True


class Lines:
    """The ``Shaper``: what was said since the last line, and a call as soon as it is whole."""

    def __init__(self, answer: OllamaAnswer) -> None:
        self._answer = answer
        self._call: tuple[str, str, list[str]] | None = None
        """Id, name and arguments of the one that is being written."""

    def moved(self, choice: Choice) -> bytes:
        said = choice.take_events()
        choice.opened = True
        text, thoughts, calls = "", "", []
        for piece in said:
            match piece:
                case ToolArguments(_, more):
                    assert self._call is not None
                    self._call[2].append(more)
                    continue
                case Content(more) | Refusal(more):
                    text += more
                case Reasoning(more):
                    thoughts += more
            calls += self._whole()
            if isinstance(piece, ToolCallBegin):
                self._call = piece.id, piece.name, []
        if choice.ended_as is not None and not choice.closed:
            choice.closed = True
            calls += self._whole()
        is_told = bool(text or thoughts or calls)
        logprobs = logprobs_of(choice) if is_told or choice.closed else UNSET
        if not (is_told or logprobs):
            return b""
        return self._answer.line(text, thoughts or UNSET, calls or UNSET, logprobs=logprobs) + b"\n"

    def last(self, extras: openai.PenstockExtras | None) -> bytes:
        return self._answer.line("", **self._answer.end()) + b"\n"

    def failed(self, failure: GatewayError) -> bytes:
        return failures.line(failure)

    def _whole(self) -> list[Call]:
        begun, self._call = self._call, None
        call = None if begun is None else _call(begun[0], begun[1], "".join(begun[2]))
        return [] if call is None else [call]


def logprobs_of(choice: Choice) -> list[openai.ChatLogprob] | UnsetType:
    """Of the tokens whose text may be told and that were not told of yet."""
    taken = cast("openai.ChatLogprobs | None", choice.take_logprobs())
    return UNSET if taken is None else taken.content


def _call(id: str, name: str, arguments: str) -> Call | None:
    """None where the arguments are no object, as of a call that was cut: its client would act on it without them."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return Call(id, CalledFunction(name, value)) if isinstance(value, dict) else None
