"""What is asked about conversations, and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.openai.requests import Metadata
from gateway.responses.requests import Include

NewItems = Annotated[list[dict[str, Any]], Meta(max_length=20)]
"""Messages, function calls and their outputs, reasoning, references to items."""


class Creation(msgspec.Struct, frozen=True, kw_only=True):
    """What it begins with."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """All of the metadata anew."""

    metadata: Metadata | None


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """Items to be added."""

    items: NewItems


class Including(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is left out that it could name."""

    include: list[Include] = msgspec.field(name="include[]", default=[])


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, apart from its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: Metadata


class DeletedConversation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
