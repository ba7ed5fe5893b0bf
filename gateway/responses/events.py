"""A response as it comes into being: its items, and the events that tell of them.

Every event has a ``sequence_number``, from 0 and without gaps, by which a stream that was cut is gone on with. Whatever
was added is done before the last event, and then has what its deltas add up to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from gateway import errors, failures, openai
from gateway.parsers import Content, Event, Reasoning, Refusal, ToolArguments, ToolCallBegin, ToolInput
from gateway.reply.choices import Choice
from gateway.responses.items import (
    AnyItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    OutputRefusal,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    SummaryText,
    id_of,
)
from gateway.responses.shapes import IncompleteDetails, ResponseBody, ResponseError, ResponseUsage
from gateway.responses.tools import names_of
from policies import terms

_json = msgspec.json.encode
replace = msgspec.structs.replace


class Events:
    """A ``reply.Shaper``; all that it says is kept in ``body`` as well."""

    def __init__(
        self,
        body: ResponseBody,
        num_input_items: int,
        obfuscates: bool = False,
        nests_errors: bool = False,
        tells_reasoning: bool = True,
    ) -> None:
        """``obfuscates``: deltas are padded. ``nests_errors``: as WebSockets have them, where an error is an object of
        its own."""
        self.body = body
        """The response so far."""
        self.usage: Callable[[], terms.Usage] | None = None
        """None until there is a prompt."""
        self._num_input_items = num_input_items
        self._obfuscates = obfuscates
        self._nests_errors = nests_errors
        self._preceding: CompactionItem | None = None
        self._usage_before = terms.Usage(0, 0, 0)
        self.is_whole = False
        """All of the answer is said, though not its end."""
        self._number = 0
        """Of the next event."""
        self._has_begun = False
        self._said: list[bytes] = []
        self._output: list[AnyItem] = []
        self._item: _Open | None = None
        self._logprobs: list[openai.ChatLogprob] = []
        """Of tokens whose text has not come yet."""
        self._tells_reasoning = tells_reasoning
        self._in_summary = body.reasoning.summary is not None
        self._names = names_of(body.tools)
        self._cut: IncompleteDetails | None = None
        """Why not all of it is said."""

    # A reply.Shaper

    def moved(self, choice: Choice) -> bytes:
        if not choice.opened:
            choice.opened = True
            self._begin()
        said, ended_as = choice.take_events(), choice.ended_as
        logprobs = choice.take_logprobs() if said or ended_as is not None else None
        if logprobs is not None:
            self._logprobs += cast(openai.ChatLogprobs, logprobs).content
        for event in said:
            self._take(event)
        if ended_as is not None and not choice.closed:
            choice.closed = self.is_whole = True
            self._cut = IncompleteDetails.of(ended_as)
            if self._item is None and len(self._output) == (self._preceding is not None):
                self._open("message")
            self._close("completed" if self._cut is None else "incomplete")
        return self._taken()

    def last(self, extras: openai.PenstockExtras | None) -> bytes:
        self.body = replace(self.body, penstock=UNSET if extras is None else extras)
        if self._cut is None:
            self._end("completed", completed_at=int(time.time()))
        else:
            self._end("incomplete", incomplete_details=self._cut)
        return self._taken()

    def failed(self, failure: errors.GatewayError) -> bytes:
        said = failures.detail(failure, is_kept=True)
        if not self._has_begun:
            self._begin()
        self._close("incomplete")
        if self._nests_errors:
            self._say("error", status=failure.status, error=said)
        else:
            self._say("error", code=said.code, message=said.message, param=said.param)
        self._end("failed", error=ResponseError.of(failure))
        return self._taken()

    def amended(self, last: bytes, **fields: Any) -> bytes:
        """The last events, when it could not be kept as it had said until then; empty where there are none."""
        self.body = replace(self.body, **fields)
        if not last:
            return last
        self._number -= 1
        self._say(f"response.{self.body.status}", response=self.body)
        return b"".join(split(last)[:-1]) + self._taken()

    def precede(self, item: CompactionItem, usage: terms.Usage) -> None:
        """Before all else it says this, which has taken so much."""
        item_id = id_of(CompactionItem, self.body.id, self._num_input_items)
        self._preceding, self._usage_before = replace(item, id=item_id), usage

    def nothing(self) -> bytes:
        """All events of one that is there to be gone on from alone."""
        self.usage = lambda: terms.Usage(0, 0, 0)
        self._begin()
        return self._taken() + self.last(None)

    # Of responses in the background

    def queued(self) -> bytes:
        """The first events of one that waits."""
        self._has_begun = True
        self._say("response.created", response=self.body)
        self._say("response.queued", response=self.body)
        return self._taken()

    def started(self, service_tier: str) -> None:
        """It is known who serves it."""
        self.body = replace(self.body, service_tier=service_tier)

    def cancelled(self) -> bytes:
        """The end of one that nobody wants any more."""
        self._close("incomplete")
        self._end("cancelled")
        return self._taken()

    # Within

    def _begin(self) -> None:
        if self.body.status == "in_progress" and self._has_begun:
            return
        self.body = replace(self.body, status="in_progress")
        if not self._has_begun:
            self._has_begun = True
            self._say("response.created", response=self.body)
        self._say("response.in_progress", response=self.body)
        if self._preceding is not None:
            self._say("response.output_item.added", output_index=0, item=self._preceding)
            self._say("response.output_item.done", output_index=0, item=self._preceding)
            self._output.append(self._preceding)

    def _end(self, status: Any, **others: Any) -> None:
        usage = None if self.usage is None else ResponseUsage.of(terms.total([self._usage_before, self.usage()]))
        self.body = replace(self.body, status=status, usage=usage, output=self._output, **others)
        kind = "incomplete" if status == "cancelled" else status
        self._say(f"response.{kind}", response=self.body)

    def _take(self, event: Event) -> None:
        match event:
            case Content(text):
                item, logprobs, self._logprobs = self._opened("message"), self._logprobs, []
                item.add(text)
                item.logprobs += logprobs
                self._say("response.output_text.delta", **item.place, content_index=0, delta=text, logprobs=logprobs)
            case Refusal(text):
                item = self._opened("refusal")
                item.add(text)
                self._say("response.refusal.delta", **item.place, content_index=0, delta=text)
            case Reasoning() if not self._tells_reasoning:
                pass
            case Reasoning(text):
                item = self._opened("reasoning")
                item.add(text)
                if self._in_summary:
                    self._say("response.reasoning_summary_text.delta", **item.place, summary_index=0, delta=text)
                else:
                    self._say("response.reasoning_text.delta", **item.place, content_index=0, delta=text)
            case ToolCallBegin(_, call_id, name, is_custom):
                self._close("completed")
                self._open("custom_tool_call" if is_custom else "function_call", call_id, name)
            case ToolArguments(_, text):
                item = self._opened("function_call")
                item.add(text)
                self._say("response.function_call_arguments.delta", **item.place, delta=text)
            case ToolInput(_, text):
                item = self._opened("custom_tool_call")
                item.add(text)
                self._say("response.custom_tool_call_input.delta", **item.place, delta=text)

    def _opened(self, kind: str) -> _Open:
        """The item of this kind that goes on, or a new one."""
        if self._item is not None and self._item.kind == kind:
            return self._item
        self._close("completed")
        return self._open(kind)

    def _open(self, kind: str, call_id: str = "", name: str = "") -> _Open:
        number = len(self._output)
        types: dict[str, type[AnyItem]] = {
            "message": MessageItem,
            "refusal": MessageItem,
            "reasoning": ReasoningItem,
            "function_call": FunctionCallItem,
            "custom_tool_call": CustomToolCallItem,
        }
        item_id = id_of(types[kind], self.body.id, self._num_input_items + number)
        named = self._names.get(name, (UNSET, name))
        item = self._item = _Open(kind, item_id, number, call_id, named, self._in_summary)
        self._say("response.output_item.added", output_index=number, item=item.begun())
        match kind:
            case "message":
                self._say("response.content_part.added", **item.place, content_index=0, part=OutputText(""))
            case "refusal":
                self._say("response.content_part.added", **item.place, content_index=0, part=OutputRefusal(""))
            case "reasoning" if self._in_summary:
                self._say("response.reasoning_summary_part.added", **item.place, summary_index=0, part=SummaryText(""))
            case "reasoning":
                self._say("response.content_part.added", **item.place, content_index=0, part=ReasoningText(""))
        return item

    def _close(self, status: Status) -> None:
        item = self._item
        if item is None:
            return
        self._item = None
        text, place = item.text, item.place
        match item.kind:
            case "message":
                # What belongs to no text any more, as an end token's.
                item.logprobs += self._logprobs
                self._logprobs = []
                self._say("response.output_text.done", **place, content_index=0, text=text, logprobs=item.logprobs)
                part = OutputText(text, logprobs=item.logprobs)
                self._say("response.content_part.done", **place, content_index=0, part=part)
            case "refusal":
                self._say("response.refusal.done", **place, content_index=0, refusal=text)
                self._say("response.content_part.done", **place, content_index=0, part=OutputRefusal(text))
            case "reasoning" if self._in_summary:
                self._say("response.reasoning_summary_text.done", **place, summary_index=0, text=text)
                self._say("response.reasoning_summary_part.done", **place, summary_index=0, part=SummaryText(text))
            case "reasoning":
                self._say("response.reasoning_text.done", **place, content_index=0, text=text)
                self._say("response.content_part.done", **place, content_index=0, part=ReasoningText(text))
            case "function_call":
                self._say("response.function_call_arguments.done", **place, name=item.name, arguments=text)
            case "custom_tool_call":
                self._say("response.custom_tool_call_input.done", **place, input=text)
        whole = item.whole(status)
        self._say("response.output_item.done", output_index=item.number, item=whole)
        self._output.append(whole)

    def _say(self, kind: str, **fields: Any) -> None:
        said = {"type": kind, "sequence_number": self._number, **fields}
        if self._obfuscates and "delta" in fields:
            said["obfuscation"] = _beside(fields["delta"])
        self._number += 1
        self._said.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _json(said)))

    def _taken(self) -> bytes:
        said, self._said = b"".join(self._said), []
        return said


def obfuscated(event: bytes) -> bytes:
    """It as a stream has it whose deltas are padded, whether or not it was written for one."""
    head, _, data = event.partition(b"\ndata: ")
    if not head.endswith(b".delta"):  # the others may be very long
        return event
    said = msgspec.json.decode(data)
    if "delta" not in said or "obfuscation" in said:
        return event
    return b"%b\ndata: %b\n\n" % (head, _json({**said, "obfuscation": _beside(said["delta"])}))


def _beside(delta: str) -> str:
    return openai.obfuscation(len(_json(delta)) - 2)  # without its quotes


class _Open:
    """An item that is being written."""

    def __init__(
        self,
        kind: str,
        item_id: str,
        number: int,
        call_id: str,
        named: tuple[str | UnsetType, str],
        in_summary: bool,
    ) -> None:
        """``named``: the namespace of the tool that is called, and its name."""
        self.kind = kind
        self.number = number
        self._namespace, self.name = named
        self.logprobs: list[openai.ChatLogprob] = []
        self.place = {"item_id": item_id, "output_index": number}
        """What its events have."""
        self._id = item_id
        self._call_id = call_id
        self._in_summary = in_summary
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def begun(self) -> AnyItem:
        """Before there is anything of it."""
        match self.kind:
            case "message" | "refusal":
                return MessageItem(id=self._id, status="in_progress", role="assistant", content=[])
            case "reasoning":
                return ReasoningItem(id=self._id, status="in_progress", content=None if self._in_summary else [])
            case _:
                return self.whole("in_progress")

    def whole(self, status: Status) -> AnyItem:
        text = self.text
        match self.kind:
            case "message" | "refusal":
                is_text = self.kind == "message"
                part = OutputText(text, logprobs=self.logprobs) if is_text else OutputRefusal(text)
                return MessageItem(id=self._id, status=status, role="assistant", content=[part])
            case "reasoning" if self._in_summary:
                return ReasoningItem(id=self._id, status=status, summary=[SummaryText(text)])
            case "reasoning":
                return ReasoningItem(id=self._id, status=status, content=[ReasoningText(text)])
            case "custom_tool_call":
                return CustomToolCallItem(
                    id=self._id,
                    status=status,
                    call_id=self._call_id,
                    name=self.name,
                    input=text,
                    namespace=self._namespace,
                )
            case _:
                return FunctionCallItem(
                    id=self._id,
                    status=status,
                    call_id=self._call_id,
                    name=self.name,
                    arguments=text,
                    namespace=self._namespace,
                )


def split(events: bytes) -> list[bytes]:
    """One by one: none has an empty line within."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
