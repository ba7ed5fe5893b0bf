"""The messages of a conversation, as a chat request brings them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.openai.failures import Malformed
from gateway.parsers.custom import ARGUMENT

WRITTEN = frozenset(("system", "developer", "user"))
"""Roles of those who write for the model."""


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content: text, or an assistant's refusal, which are what a text model reads."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        """Its text, whichever it is."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class FunctionCall(msgspec.Struct, frozen=True):
    """What an earlier answer called; ``arguments`` is JSON text."""

    name: str
    arguments: str | dict[str, Any]


class CustomCall(msgspec.Struct, frozen=True):
    """What an earlier answer called with a text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    """One call in an assistant's message; it has the field that its type names."""

    function: FunctionCall | UnsetType | None = UNSET
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | UnsetType | None = UNSET

    @property
    def called(self) -> FunctionCall:
        """As a model writes it."""
        if self.type == "custom":
            assert isinstance(self.custom, CustomCall)
            return FunctionCall(self.custom.name, {ARGUMENT: self.custom.input})
        assert isinstance(self.function, FunctionCall)
        return self.function


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation so far. ``function`` and ``function_call`` are what tools and their calls were
    before."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    audio: Any = None
    reasoning: str | None = None
    """vLLM's newer name of ``reasoning_content``."""

    @property
    def thought(self) -> str | None:
        """What it thought before it said anything."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def is_plain(self) -> bool:
        """A user's or a system's text, as most are."""
        return (
            type(self.content) is str
            and (self.role == "user" or self.role == "system")
            and not self.tool_calls
            and self.function_call is None
        )

    @property
    def calls(self) -> list[ToolCall]:
        """What it called, in either form."""
        if self.tool_calls:
            return self.tool_calls
        return [ToolCall(self.function_call)] if self.function_call is not None else []

    @property
    def text(self) -> str:
        """What it says."""
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            return self.refusal or ""
        return "\n".join(part.said for part in self.content)


def check_text(text: str, path: str) -> None:
    """Of what somebody wrote for the model. Tools may say anything, and so may the model that read it. Raises
    Malformed."""
    if "\0" in text:
        raise Malformed(f"Invalid '{path}': a NUL character is in it.", path, "invalid_value")


def check_message(message: Message, path: str) -> None:
    """Raises Malformed for what its shape alone does not say."""
    content = message.content
    if message.role in WRITTEN:
        check_text(message.text, f"{path}.content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            where = f"{path}.content[{i}]"
            known = ("text", "refusal") if message.role == "assistant" else ("text",)
            if part.type not in known:
                shown = part.type[:40].encode("unicode_escape").decode()
                others = "only 'text' is" if len(known) == 1 else "only 'text' and 'refusal' are"
                kind = f"Invalid '{where}.type': '{shown}' is not supported, {others}"
                raise Malformed(kind, f"{where}.type", "unsupported_value")
            if (part.refusal if part.type == "refusal" else part.text) is None:
                missing = f"{where}.{part.type}"
                raise Malformed(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    elif content is None and (message.role != "assistant" or not (message.calls or message.refusal or message.thought)):
        raise Malformed(
            f"Invalid '{path}.content': text is required here, but it is missing or null", f"{path}.content"
        )
    for i, call in enumerate(message.tool_calls or ()):
        if not isinstance(call.custom if call.type == "custom" else call.function, CustomCall | FunctionCall):
            missing = f"{path}.tool_calls[{i}].{call.type}"
            raise Malformed(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    if message.audio is not None:
        raise Malformed(f"'{path}.audio' is not supported by this server", f"{path}.audio", "unsupported_parameter")
    if message.role == "tool" and message.tool_call_id is None:
        missing = f"{path}.tool_call_id"
        raise Malformed(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    if message.role == "function" and message.name is None:
        missing = f"{path}.name"
        raise Malformed(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    if message.role != "assistant" and message.calls:
        where = f"{path}.{'tool_calls' if message.tool_calls else 'function_call'}"
        raise Malformed(f"Invalid '{where}': only the assistant calls", where)
