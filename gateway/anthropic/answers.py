"""One answer as a message: a JSON body, or a stream of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai
from gateway.anthropic import failures
from gateway.anthropic.responses import SIGNATURE, MessageBody, Reason, Text, Thought, ToolUse, UsageBody
from gateway.errors import GatewayError
from gateway.parsers import Content, Event, Reasoning, Refusal, ToolArguments, ToolCallBegin
from gateway.reply import Answer, Choice, Shaper

encode = msgspec.json.encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageAnswer(Answer):
    """To /v1/messages. There is one choice."""

    endpoint = "/v1/messages"
    _id_prefix = "msg_"
    _continues = False

    def limit_headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        return failures.limited(headers)

    @property
    def tells_thinking(self) -> bool:
        """Else there is a block of it without a word."""
        assert isinstance(self.call, openai.ChatRequest)
        return self.call.include_reasoning is not False

    def shaper(self) -> Shaper:
        return Events(self)

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        (choice,) = self.choices
        said = choice.said()
        content: list[Text | ToolUse | Thought] = []
        if said.reasoning:
            content.append(Thought(said.reasoning if self.tells_thinking else ""))
        if said.text:
            content.append(Text(said.text))
        content += [ToolUse(call_id(call.id), call.name, _object(call.arguments)) for call in said.calls]
        return encode(self.message(content, self.stop_reason(), choice.stopped_by, extras or UNSET))

    def message(
        self,
        content: list[Text | ToolUse | Thought],
        reason: Reason | None,
        stopped_by: str | None,
        extras: openai.PenstockExtras | UnsetType = UNSET,
    ) -> MessageBody:
        """As far as it has come."""
        return MessageBody(
            id=self.id,
            model=self.call.model,
            content=content,
            stop_reason=reason,
            stop_sequence=stopped_by,
            usage=UsageBody.of(self.usage(), self.service_tier),
            penstock=extras,
        )

    def stop_reason(self) -> Reason:
        """How it ended."""
        (choice,) = self.choices
        match choice.ended_as:
            case "tool_calls":
                return "tool_use"
            case "length":
                (part,) = self.parts.values()
                assert isinstance(self.call, openai.ChatRequest)
                most, asked = part.submit.sampling.max_tokens, self.call.asked_tokens
                is_cut = asked is not None and most < asked and choice.num_tokens >= most
                return "model_context_window_exceeded" if is_cut else "max_tokens"
            case "content_filter":
                return "refusal"
            case _:
                return "end_turn" if choice.stopped_by is None else "stop_sequence"


class Events:
    """The ``Shaper`` of a message: blocks of content one after the other, each begun and ended."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self._num_blocks = 0
        self._kind: type[Event] | None = None
        """Of the block that is open: Content, Reasoning or ToolCallBegin."""

    def moved(self, choice: Choice) -> bytes:
        said = choice.take_events()
        events: list[bytes] = []
        if not choice.opened:
            choice.opened = True
            events.append(_event("message_start", message=self._answer.message([], None, None)))
        for piece in said:
            self._say(piece, events)
        if choice.ended_as is not None and not choice.closed:
            choice.closed = True
            self._close(events)
        return b"".join(events)

    def last(self, extras: openai.PenstockExtras | None) -> bytes:
        answer = self._answer
        (choice,) = answer.choices
        delta = {"stop_reason": answer.stop_reason(), "stop_sequence": choice.stopped_by}
        more = {} if extras is None else {"penstock": extras}
        end = _event("message_delta", delta=delta, usage=UsageBody.of(answer.usage()), **more)
        return end + _event("message_stop")

    def failed(self, failure: GatewayError) -> bytes:
        (part,) = self._answer.parts
        return failures.event(failure, part)

    def _say(self, piece: Event, events: list[bytes]) -> None:
        match piece:
            case Content(text) | Refusal(text):
                self._within(Content, events, {"type": "text", "text": ""})
                self._delta(events, {"type": "text_delta", "text": text})
            case Reasoning(text):
                self._within(Reasoning, events, {"type": "thinking", "thinking": "", "signature": ""})
                if self._answer.tells_thinking:
                    self._delta(events, {"type": "thinking_delta", "thinking": text})
            case ToolCallBegin(_, id, name):
                self._close(events)
                block = {"type": "tool_use", "id": call_id(id), "name": name, "input": {}}
                self._within(ToolCallBegin, events, block)
            case ToolArguments(_, text):
                self._delta(events, {"type": "input_json_delta", "partial_json": text})

    def _within(self, kind: type[Event], events: list[bytes], block: dict[str, Any]) -> None:
        """Begins a block unless one of the kind is open."""
        if self._kind is kind:
            return
        self._close(events)
        self._kind = kind
        events.append(_event("content_block_start", index=self._num_blocks, content_block=block))
        if not self._num_blocks:
            events.append(PING)
        self._num_blocks += 1

    def _close(self, events: list[bytes]) -> None:
        if self._kind is None:
            return
        if self._kind is Reasoning:
            self._delta(events, {"type": "signature_delta", "signature": SIGNATURE})
        self._kind = None
        events.append(_event("content_block_stop", index=self._num_blocks - 1))

    def _delta(self, events: list[bytes], delta: dict[str, Any]) -> None:
        events.append(_event("content_block_delta", index=self._num_blocks - 1, delta=delta))


def call_id(id: str) -> str:
    """Anthropic's begin otherwise."""
    return "toolu_" + id.removeprefix("call_")


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def _object(arguments: str) -> dict[str, Any]:
    """What a call was given; nothing where it was cut before it could be read."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
