"""Harmony, as gpt-oss writes: an answer in messages, each with a head that says its channel and whom it is for.

``<|channel|>analysis<|message|>`` is reasoning, ``final`` is content, and so is ``commentary`` without a recipient;
with ``to=functions.name`` it is a call, after which the model stops. Where this was read: openai/harmony,
``docs/format.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

from gateway.parsers.calls import Calls, Frame, quoted
from gateway.parsers.events import Content, Event, Reasoning, ToolArguments, ToolCallBegin
from gateway.parsers.marks import Marks, without_marks
from gateway.parsers.reader import Wanted, begun, first_of, merged, new_call_id

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MAX_HEAD_CHARS = 512
"""A longer one is none, and what it says is content."""
_FUNCTION = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]+)")


class Harmony(Calls):
    """One call, in a message of its own."""

    marks = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        head = quoted(f"commentary to=functions.{name} ")
        return f"{words[CHANNEL]} {head} {words[CONSTRAIN]} {quoted('json')} {words[MESSAGE]} {arguments}"

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return call

    def frame(self, words: Mapping[str, str]) -> Frame:
        thought = f"{words[CHANNEL]} {quoted('analysis')} {words[MESSAGE]} thought {words[START]} {quoted('assistant')}"
        ends = words[END]
        rule = f"thought: /(?s:.*)/ {ends}" if ends.startswith("<") else f"thought[suffix={ends}]: /(?s:.*)/"
        return Frame(thought, f"{words[CHANNEL]} {quoted('final')} {words[MESSAGE]}", rule)


class Kind(Enum):
    """Of a message."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Channels:
    """A ``Parser`` of it."""

    def __init__(self, marks: Marks, calls: Calls, wanted: Wanted | None) -> None:
        self.marks = marks.by_id
        self.is_over = False
        self.num_calls = 0
        self.is_in_call = False
        self.num_reasoning_tokens = 0
        self._spelled = marks.spelled
        self._ends = tuple(marks.spelled[word] for word in (END, RETURN, CALL, START))
        self._calls = calls
        self._wanted = wanted
        self._buffer = ""
        self._events: list[Event] = []
        self._kind: Kind | None = None
        """Of the message that is read; None: its head is."""
        self._num_head_tokens = 0
        self._has_arguments = False
        self._is_ended = self._is_cut = False

    # Parser

    def feed(self, text: str) -> None:
        kind = self._kind
        if kind is Kind.REASONING:
            self.num_reasoning_tokens += 1
        elif kind is None:
            self._num_head_tokens += 1
        self.rest(text)
        if kind is None and self._kind is not None:
            if self._kind is Kind.REASONING:
                self.num_reasoning_tokens += self._num_head_tokens
            self._num_head_tokens = 0

    def rest(self, text: str) -> None:
        self._buffer += text
        while not self.is_over and (self._read_head() if self._kind is None else self._read_message()):
            pass

    def finish(self, is_cut: bool = False) -> None:
        if not self._is_ended:
            self._is_ended, self._is_cut = True, is_cut
            self.rest("")
            if self._kind is Kind.CALL and not is_cut:
                self._end_call()

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events

    # Each takes what it can from the front of the buffer, and says whether to go on.

    def _read_head(self) -> bool:
        message = self._spelled[MESSAGE]
        at = self._buffer.find(message)
        if at >= 0:
            head, self._buffer = self._buffer[:at], self._buffer[at + len(message) :]
            self._kind = self._kind_of(head)
            return True
        is_none = not any(word in self._buffer for word in self._spelled.values())
        is_cut_off = self._is_cut and begun(self._buffer, self._spelled.values(), True, True)
        if is_none and (len(self._buffer) > MAX_HEAD_CHARS or (self._is_ended and self._buffer and not is_cut_off)):
            self._kind = Kind.CONTENT  # the model does not write as it was taught
            return True
        return False

    def _kind_of(self, head: str) -> Kind:
        """Of the message with this head; a call begins."""
        if (named := _FUNCTION.search(head)) is not None:
            wanted, name = self._wanted, named[1]
            if wanted is None or not wanted.is_call(name) or (self.num_calls and not wanted.several):
                return Kind.CONTENT
            self._events.append(ToolCallBegin(self.num_calls, new_call_id(self._calls), name))
            self.num_calls += 1
            self.is_in_call, self._has_arguments = True, False
            return Kind.CALL
        channel = head.partition(self._spelled[CHANNEL])[2].strip()
        # What is for a tool of the model's own is nothing for its user.
        return Kind.REASONING if channel.startswith("analysis") or "to=" in head else Kind.CONTENT

    def _read_message(self) -> bool:
        at, word = first_of(self._buffer, self._ends)
        if word:
            self._say(self._buffer[:at])
            # A message that begins has ended the one before it.
            self._buffer = self._buffer[at if word == self._spelled[START] else at + len(word) :]
            if self._kind is Kind.CALL:
                self._end_call()
            self._kind = None
            return True
        text = self._buffer
        text = text[: len(text) - begun(text, self._ends, self._is_ended, self._is_cut)]
        self._say(text)
        self._buffer = self._buffer[len(text) :]
        return False

    def _say(self, text: str) -> None:
        text = without_marks(text)
        if not text:
            return
        match self._kind:
            case Kind.REASONING:
                self._events.append(Reasoning(text))
            case Kind.CALL:
                self._has_arguments = True
                self._events.append(ToolArguments(self.num_calls - 1, text))
            case _:
                self._events.append(Content(text))

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._events.append(ToolArguments(self.num_calls - 1, "{}"))
            self._has_arguments = True
        assert self._wanted is not None
        self.is_in_call = False
        self.is_over = not self._wanted.several
