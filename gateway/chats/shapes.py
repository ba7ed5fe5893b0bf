"""What is asked about kept chats, and what is answered."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from gateway import openai
from gateway.openai.messages import Message, TextPart, ToolCall
from gateway.openai.requests import Metadata


class ChatQuery(msgspec.Struct, frozen=True, kw_only=True):
    """``after``: the id of a completion; the page begins behind it. ``metadata``: pairs that all of them have, each as
    ``metadata[key]=value``."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"
    model: str | None = None
    metadata: Metadata = {}


class ChatMessageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """``after``: the id of a message; the page begins behind it."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"


class ChatChange(msgspec.Struct, frozen=True, kw_only=True):
    """All of the metadata anew."""

    metadata: Metadata | None


class KeptCompletion(openai.ChatCompletion, frozen=True, kw_only=True):
    """A kept chat completion."""

    metadata: Metadata | None


class KeptList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of kept chat completions."""

    object: Literal["list"] = "list"
    data: list[KeptCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class KeptPage(msgspec.Struct, frozen=True, kw_only=True):
    """A ``KeptList`` of what is JSON already."""

    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class KeptMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a chat was asked with."""

    id: str
    role: str
    content: str | None
    content_parts: list[TextPart] | None
    name: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | None
    tool_call_id: str | None

    @classmethod
    def of(cls, message: Message, chat_id: str, number: int) -> KeptMessage:
        """``number``: from 0, in the order of the conversation."""
        content = message.content
        return cls(
            id=f"{chat_id}-{number}",
            role=message.role,
            content=content if isinstance(content, str) else None,
            content_parts=content if isinstance(content, list) else None,
            name=message.name,
            refusal=message.refusal,
            tool_calls=message.calls or None,
            tool_call_id=message.tool_call_id,
        )


class KeptMessages(msgspec.Struct, frozen=True, kw_only=True):
    """A page of them."""

    object: Literal["list"] = "list"
    data: list[KeptMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True
