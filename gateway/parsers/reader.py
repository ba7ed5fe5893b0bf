"""The parser of models that write reasoning first, then text and calls, one after the other.

Text goes through a buffer: each state takes from its front what can be told by now whatever follows, so the events do
not depend on how the tokens arrived. A call is only a call once its name is one of the request's tools, or any behind a
word that only calls have, and its arguments have begun; until then it is held, and what turns out to be something else
is content, word for word.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gateway.parsers.calls import Calls, is_calling
from gateway.parsers.events import Content, Event, Reasoning, ToolArguments, ToolCallBegin
from gateway.parsers.marks import Marks, without_marks
from gateway.parsers.scan import MAX_HELD_CHARS, NotACall, Read

MIN_WORD_CHARS = 2
"""Of a word that was cut: less is more likely something else."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_ID_CHARS = string.ascii_letters + string.digits


class Thinking(NamedTuple):
    """The words around a model's reasoning."""

    opens: str
    closes: str


class Wanted(NamedTuple):
    """Which tools a request lets be called."""

    names: frozenset[str]
    several: bool
    """Several calls in one answer; otherwise the first one ends it."""
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """What their arguments have to be, by the names of tools and of arguments."""
    custom: frozenset[str] = frozenset()
    """Of the names, those of tools that take text."""
    withheld: frozenset[str] = frozenset()
    """Tools of the request that may not be called."""

    def is_call(self, name: str) -> bool:
        """Of what is marked as one. A name that nobody offered is a client's to answer, as it is OpenAI's and vLLM's:
        a model that hears that there is no such tool takes another."""
        return name in self.names or (name not in self.withheld and _NAME.fullmatch(name) is not None)


class Reader:
    """A ``Parser``."""

    def __init__(
        self, marks: Marks, thinking: Thinking | None, is_thinking: bool, calls: Calls | None, wanted: Wanted | None
    ) -> None:
        """``is_thinking``: the prompt has opened the reasoning. ``calls`` and ``wanted``: where there are tools."""
        self.marks = marks.by_id
        self.is_over = False
        self.num_calls = 0
        self.is_in_call = False
        self.num_reasoning_tokens = 0
        self._spelled = marks.spelled
        self._thinking = thinking
        self._calls = calls if wanted is not None else None
        self._wanted = wanted
        self._openers = tuple(marks.spelled[word] for word in calls.opens) if self._calls and calls else ()
        self._buffer = ""
        self._events: list[Event] = []
        self._num_fed = 0
        self._is_ended = self._is_cut = False
        self._is_reasoning = is_thinking
        self._has_reasoned = False
        self._has_thought = False
        """Something of its reasoning was told: what follows is not its first line."""
        self._drops_space = False
        self._is_first = True
        """Nothing but space and reasoning was said."""
        self._section: Read[None] | None = None
        """Reads what may be calls."""
        self._num_read = 0
        """Of the buffer, by the section."""
        self._opened_by = ""
        """What opened the section, with the space before it."""
        self._has_begun = False
        """The section has a call."""
        self._was_told = False
        """All that the section has read until now is part of calls."""
        self._arguments: list[str] = []
        self._state: Callable[[], bool] = self._begin
        if is_thinking:
            self._state = self._think
        elif thinking is None:
            self._state = self._say

    # Parser

    def feed(self, text: str) -> None:
        self._num_fed += 1
        was_reasoning = self._is_reasoning
        self.rest(text)
        if was_reasoning:
            self.num_reasoning_tokens += 1
        elif self._has_reasoned and not self.num_reasoning_tokens:
            self.num_reasoning_tokens = self._num_fed

    def rest(self, text: str) -> None:
        self._buffer += text
        self._run()

    def finish(self, is_cut: bool = False) -> None:
        if not self._is_ended:
            self._is_ended, self._is_cut = True, is_cut
            self._run()

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events

    # States: each takes what it can from the front of the buffer, and returns whether another one is to go on.

    def _run(self) -> None:
        while not self.is_over and self._state():
            pass

    def _begin(self) -> bool:
        """Before the first word: does it reason?"""
        assert self._thinking is not None
        text, opens = self._buffer.lstrip(), self._spelled[self._thinking.opens]
        if text.startswith(opens):
            self._buffer = text[len(opens) :]
            self._is_reasoning = self._has_reasoned = True
            self._state = self._think
            return True
        if opens.startswith(text) and (not self._is_ended or (self._is_cut and len(text) >= MIN_WORD_CHARS)):
            return False
        self._state = self._say
        return True

    def _think(self) -> bool:
        """Up to the word that closes the reasoning; newlines around it are the template's."""
        assert self._thinking is not None
        closes = self._spelled[self._thinking.closes]
        if not self._has_thought:
            self._buffer = self._buffer.lstrip("\n")
        at = self._buffer.find(closes)
        end = at if at >= 0 else len(self._buffer) - begun(self._buffer, (closes,), self._is_ended, self._is_cut)
        text = self._buffer[:end] if self._is_ended and at < 0 else self._buffer[:end].rstrip("\n")
        if text:
            self._has_thought = True
            self._events.append(Reasoning(without_marks(text)))
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer = self._buffer[at + len(closes) :]
        self._is_reasoning, self._drops_space = False, True
        self._state = self._say
        return True

    def _say(self) -> bool:
        """Content, up to the next call."""
        if self._drops_space:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            self._drops_space = False
        if self._calls is None:
            self._content(self._buffer)
            self._buffer = ""
            return False
        if self._is_first and self._calls.first_chars:
            text = self._buffer.lstrip()
            if not text and not self._is_ended:
                return False
            if text and text[0] in self._calls.first_chars:
                self._open(self._buffer[: -len(text)], "", text)
                return True
        at, opener = first_of(self._buffer, self._openers)
        if opener:
            before = self._buffer[:at]
            text = before.rstrip()
            self._content(text)
            self._open(before[len(text) :], opener, self._buffer[at + len(opener) :])
            return True
        text = self._buffer
        num_begun = begun(text, self._openers, self._is_ended, self._is_cut)
        if num_begun or not self._is_ended:
            text = text[: len(text) - num_begun].rstrip()
        self._content(text)
        self._buffer = self._buffer[len(text) :]
        return False

    def _open(self, space: str, opener: str, rest: str) -> None:
        assert self._calls is not None
        self._opened_by = space + opener
        self._buffer, self._num_read = rest, 0
        self._section = self._calls.read(self._spelled, self)
        next(self._section)
        self._has_begun = self._is_first = False
        self._state = self._call

    def _call(self) -> bool:
        """What may be calls, or is."""
        assert self._section is not None
        buffer, at, num_kept, is_done = self._buffer, self._num_read, 0, False
        try:
            while at < len(buffer) and not self.is_over:
                self._section.send(buffer[at])
                at += 1
                if self._was_told:
                    self._was_told = False
                    num_kept = at
        except StopIteration:
            num_kept = at + 1
            is_done = True
        except NotACall:
            is_done = True
        self._tell()
        self._buffer, self._num_read = buffer[num_kept:], at - num_kept
        if self.is_over or not (is_done or self._is_ended or self._num_read > MAX_HELD_CHARS):
            return False
        self._section.close()
        is_cut_off = self._is_ended and not is_done
        if is_cut_off and (self._has_begun or (self._is_cut and self._is_meant())):
            self._buffer = ""  # the answer ended within what only calls have
        elif not self._has_begun:
            self._content(self._opened_by)
        self._drops_space = self._has_begun
        self._state = self._say
        return True

    def _is_meant(self) -> bool:
        """Whether what could become a call is one that was cut, and not text that looks like one until then."""
        assert self._calls is not None
        assert self._wanted is not None
        return bool(self._opened_by.strip()) or is_calling(self._buffer, self._wanted.names)

    # Sink

    def begin(self, name: str) -> None:
        assert self._wanted is not None
        assert self._calls is not None
        is_marked = bool(self._opened_by.strip())
        is_call = self._wanted.is_call(name) if is_marked else name in self._wanted.names
        if not is_call or (self.num_calls and not self._wanted.several):
            raise NotACall
        self._tell()
        self._events.append(ToolCallBegin(self.num_calls, new_call_id(self._calls), name))
        self.num_calls += 1
        self.is_in_call = self._has_begun = self._was_told = True

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._was_told = True

    def end(self) -> None:
        assert self._wanted is not None
        self._tell()
        self._was_told = True
        self.is_in_call = False
        self.is_over = not self._wanted.several

    def schema(self, name: str, key: str) -> Any:
        assert self._wanted is not None
        return self._wanted.schemas.get(name, {}).get(key)

    def _tell(self) -> None:
        if self._arguments:
            if text := "".join(self._arguments):
                self._events.append(ToolArguments(self.num_calls - 1, text))
            self._arguments.clear()

    def _content(self, text: str) -> None:
        if text and self.marks:
            text = without_marks(text)
        if text:
            self._is_first = False
            self._events.append(Content(text))


def new_call_id(calls: Calls) -> str:
    """One that nobody had before, as the family's own are."""
    return calls.id_prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(calls.id_chars))


def first_of(text: str, words: Iterable[str]) -> tuple[int, str]:
    """Where the first of the words is, and which; the word is empty where there is none."""
    found = min(((at, word) for word in words if (at := text.find(word)) >= 0), default=(-1, ""))
    return found


def overlap(text: str, words: Iterable[str]) -> int:
    """How many characters at the end of the text could begin one of the words."""
    for num in range(min(len(text), max(map(len, words), default=1) - 1), 0, -1):
        end = text[-num:]
        if any(word.startswith(end) for word in words):
            return num
    return 0


def begun(text: str, words: Iterable[str], is_ended: bool, is_cut: bool) -> int:
    """How many characters at the end of it are no text: they may begin one of the words, or would have."""
    num = overlap(text, tuple(words))
    return num if not is_ended or (is_cut and num >= MIN_WORD_CHARS) else 0


def merged(events: list[Event]) -> list[Event]:
    """The same, with neighbours of one kind as one."""
    joined: list[Event] = []
    texts: list[str] = []
    for event in events:
        last = joined[-1] if joined else None
        if texts and type(last) is type(event) and not isinstance(event, ToolCallBegin):
            texts.append(event.text)
            continue
        if len(texts) > 1:
            assert last is not None
            assert not isinstance(last, ToolCallBegin)
            joined[-1] = last._replace(text="".join(texts))
        joined.append(event)
        texts = [] if isinstance(event, ToolCallBegin) else [event.text]
    if len(texts) > 1:
        last = joined[-1]
        assert not isinstance(last, ToolCallBegin)
        joined[-1] = last._replace(text="".join(texts))
    return joined
