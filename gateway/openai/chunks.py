"""Answers that are a stream of events.

A chunk is a constant head, the text as JSON, and a constant tail; heads and tails are made once a stream, so that a
token costs one small JSON string and a join.
"""

from __future__ import annotations

import secrets
from typing import ClassVar

import msgspec

from gateway.openai.failures import ErrorBody, ErrorDetail
from gateway.openai.receipts import PenstockExtras
from gateway.openai.responses import Logprobs, UsageBody
from gateway.parsers import Content, Event, Reasoning, Refusal, ToolArguments, ToolCallBegin, ToolInput
from policies.terms import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: proxies see traffic, clients see nothing."""
PADDED_TO = 32
"""Bytes: of what a piece of a stream says, with ``obfuscation``, a multiple of these."""

_json = msgspec.json.encode


def obfuscation(num_bytes: int) -> str:
    """Random characters beside so many bytes, which make most tokens alike in length."""
    return secrets.token_hex(PADDED_TO // 2)[: -num_bytes % PADDED_TO]


class Chunks:
    """The events of one stream, whose id, time and model stay the same throughout."""

    done: ClassVar[bytes] = DONE
    """What follows the last of them."""
    _object: str
    _names_tier: bool

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        service_tier: str,
        fingerprint: str,
        num_choices: int,
        usage: bool,
        obfuscates: bool = False,
    ) -> None:
        """``usage``: every chunk says ``"usage":null``, until the last one gives it. ``obfuscates``: pieces of the
        answer are padded."""
        self._start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,%b"system_fingerprint":%b,"choices":[' % (
            _json(id),
            _json(self._object),
            created,
            _json(model),
            b'"service_tier":%b,' % _json(service_tier) if self._names_tier else b"",
            _json(fingerprint),
        )
        self._end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._heads = [self._head(index) for index in range(num_choices)]
        self._tail = self._after_text() + b'"logprobs":null,"finish_reason":null}' + self._end
        self._num_around = len(self._heads[0]) + len(_json("")) + len(self._tail)
        self._obfuscates = obfuscates

    def _head(self, index: int) -> bytes:
        """All of a chunk with text that comes before the text."""
        raise NotImplementedError

    def _after_text(self) -> bytes:
        """Between the text and the choice's other fields."""
        raise NotImplementedError

    def _empty(self) -> bytes:
        """What a choice's last chunk has in place of text."""
        raise NotImplementedError

    def _of(self, event: Event) -> bytes:
        """What a chunk has of a piece of the answer."""
        raise NotImplementedError

    def opening(self, index: int, content: str | None = "") -> bytes:
        """What comes before a choice's first text; may be nothing. ``content``: None where something else than text
        comes first."""
        raise NotImplementedError

    def text(self, index: int, text: str) -> bytes:
        """One chunk with text."""
        chunk = self._heads[index] + _json(text) + self._tail
        return self._padded(chunk) if self._obfuscates else chunk

    def piece(self, index: int, event: Event, logprobs: Logprobs | None) -> bytes:
        """One chunk with a piece of the answer, and log-probabilities of the tokens that came until then."""
        if logprobs is None and isinstance(event, Content):
            return self.text(index, event.text)
        chunk = b'%b{"index":%d,%b"logprobs":%b,"finish_reason":null}%b' % (
            self._start,
            index,
            self._of(event),
            _json(logprobs),
            self._end,
        )
        return self._padded(chunk) if self._obfuscates else chunk

    def _padded(self, chunk: bytes) -> bytes:
        padding = obfuscation(len(chunk) - self._num_around)
        return b'data: {"obfuscation":%b,%b' % (_json(padding), chunk.removeprefix(b"data: {"))

    def only_logprobs(self, index: int, logprobs: Logprobs) -> bytes:
        """One chunk for tokens without text."""
        return b'%b{"index":%d,%b"logprobs":%b,"finish_reason":null}%b' % (
            self._start,
            index,
            self._empty(),
            _json(logprobs),
            self._end,
        )

    def finish(self, index: int, reason: str) -> bytes:
        """A choice's last chunk."""
        return b'%b{"index":%d,%b"logprobs":null,"finish_reason":%b}%b' % (
            self._start,
            index,
            self._empty(),
            _json(reason),
            self._end,
        )

    def last(self, usage: Usage | None, extras: PenstockExtras | None = None) -> bytes:
        """The stream's last chunk, with as much of it as was asked for; no chunk when nothing was."""
        parts = []
        if usage is not None:
            parts.append(b'"usage":' + _json(UsageBody.of(usage)))
        if extras is not None:
            parts.append(b'"penstock":' + _json(extras))
        return b"%b],%b}\n\n" % (self._start, b",".join(parts)) if parts else b""

    def failure(self, detail: ErrorDetail) -> bytes:
        """What the stream ends with instead, once it has begun."""
        return b"data: " + _json(ErrorBody(detail)) + b"\n\n"


class ChatChunks(Chunks):
    """``chat.completion.chunk`` events."""

    _object = "chat.completion.chunk"
    _names_tier = True
    is_legacy = False
    """Calls are told as the older ``function_call``."""
    tells_reasoning = True

    def piece(self, index: int, event: Event, logprobs: Logprobs | None) -> bytes:
        if self.tells_reasoning or not isinstance(event, Reasoning):
            return super().piece(index, event, logprobs)
        return b"" if logprobs is None else self.only_logprobs(index, logprobs)

    def finish(self, index: int, reason: str) -> bytes:
        if self.is_legacy and reason == "tool_calls":
            reason = "function_call"
        return super().finish(index, reason)

    def _head(self, index: int) -> bytes:
        return b'%b{"index":%d,"delta":{"content":' % (self._start, index)

    def _after_text(self) -> bytes:
        return b"},"

    def _empty(self) -> bytes:
        return b'"delta":{},'

    def _of(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return b'"delta":{"content":%b},' % _json(text)
            case Reasoning(text):
                return b'"delta":{"reasoning_content":%b},' % _json(text)
            case Refusal(text):
                return b'"delta":{"refusal":%b},' % _json(text)
            case ToolCallBegin(_, _, name) if self.is_legacy:
                return b'"delta":{"function_call":{"name":%b,"arguments":""}},' % _json(name)
            case ToolArguments(_, text) if self.is_legacy:
                return b'"delta":{"function_call":{"arguments":%b}},' % _json(text)
            case ToolCallBegin(number, id, name, True):
                return (
                    b'"delta":{"tool_calls":[{"index":%d,"id":%b,"type":"custom",'
                    b'"custom":{"name":%b,"input":""}}]},' % (number, _json(id), _json(name))
                )
            case ToolInput(number, text):
                return b'"delta":{"tool_calls":[{"index":%d,"custom":{"input":%b}}]},' % (number, _json(text))
            case ToolCallBegin(number, id, name):
                return (
                    b'"delta":{"tool_calls":[{"index":%d,"id":%b,"type":"function",'
                    b'"function":{"name":%b,"arguments":""}}]},' % (number, _json(id), _json(name))
                )
            case ToolArguments(number, text):
                return b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]},' % (number, _json(text))

    def opening(self, index: int, content: str | None = "") -> bytes:
        return b'%b{"index":%d,"delta":{"role":"assistant","content":%b,"refusal":null},%b%b' % (
            self._start,
            index,
            _json(content),
            b'"logprobs":null,"finish_reason":null}',
            self._end,
        )


class CompletionChunks(Chunks):
    """``text_completion`` events."""

    _object = "text_completion"
    _names_tier = False

    def _head(self, index: int) -> bytes:
        return b'%b{"index":%d,"text":' % (self._start, index)

    def _after_text(self) -> bytes:
        return b","

    def _empty(self) -> bytes:
        return b'"text":"",'

    def _of(self, event: Event) -> bytes:
        assert isinstance(event, Content)
        return b'"text":%b,' % _json(event.text)

    def opening(self, index: int, content: str | None = "") -> bytes:
        return b""
