"""Compaction: in place of a conversation what its users said, and a summary of the rest that the model writes.

The summary is sealed for the client to keep, and opened for its tenant alone where it comes back as an item. One that
is made on the way to an answer stands for all that is before it, and has the user's messages with it. The model is
asked for it behind the conversation as it stands, so that the prefix cache has all of that. Where the shapes were read:
openai-python's ``types/responses/compacted_response.py``.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai, reply
from gateway.openai import Malformed
from gateway.openai.requests import CacheSalt, Named, PenstockOptions
from gateway.reply.choices import ChatLogprobs
from gateway.responses.context import CacheOptions, ImageOptions
from gateway.responses.items import AnyItem, CompactionItem, MessageItem, id_of, said_by_user
from gateway.responses.requests import Id, ResponseRequest
from gateway.responses.shapes import ResponseUsage
from gateway.sealing import sealed, unsealed

MAX_SUMMARY_TOKENS = 4096
ASKING = """\
All of this conversation but the user's own messages is about to be dropped, and whoever goes on with it has a \
summary that you write now. Say what was asked for, and what of it is done; what was found out or decided, and why; \
which calls of tools have results that still matter, and these; names, numbers, addresses and quotations word for \
word; what is left to do, and what comes next. Keep what still holds of an earlier summary. Do not answer the user, \
and call no tool: write the summary alone."""
READING = "What was said up to here besides the user's own messages, as a summary to go on from:\n\n"
_WHAT, _WHOLE = "compaction", "context"
"""A summary alone, and all that a conversation goes on from."""


class CompactRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses/compact."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    """Text of the user, or items, as in a response."""
    instructions: str | None = None
    """As those of the response that would have come next."""
    previous_response_id: Id | None = None
    prompt_cache_key: Named | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    image: ImageOptions | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    cache_salt: CacheSalt | None = None
    penstock: PenstockOptions | None = None

    def response(self) -> ResponseRequest:
        """The response that the summary is the text of."""
        return ResponseRequest(**msgspec.structs.asdict(self), max_output_tokens=MAX_SUMMARY_TOKENS, store=False)


class CompactedBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversation goes on from: the user's messages, and behind them the summary."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[MessageItem | CompactionItem]
    usage: ResponseUsage
    penstock: openai.PenstockExtras | UnsetType = UNSET


class CompactedAnswer(reply.Answer):
    """To /v1/responses/compact."""

    endpoint = "/v1/responses/compact"
    _logprobs = ChatLogprobs
    _id_prefix = "resp_"
    _continues = False

    def __init__(self, secret: bytes, tenant_id: str, kept: Sequence[MessageItem], *others: Any) -> None:
        super().__init__(*others)
        self._secret, self._tenant_id = secret, tenant_id
        self._kept = kept

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        (choice,) = self.choices
        text = sealed(self._secret, _WHAT, self._tenant_id, choice.said().content or "")
        item_id = id_of(CompactionItem, self.id, len(self._kept))
        summary = CompactionItem(id=item_id, encrypted_content=base64.urlsafe_b64encode(text).decode())
        body = CompactedBody(
            id=self.id,
            created_at=self.created,
            output=[*self._kept, summary],
            usage=ResponseUsage.of(self.usage()),
            penstock=extras or UNSET,
        )
        return msgspec.json.encode(body)


_decoder = msgspec.json.Decoder(CompactRequest)
_items = msgspec.json.Decoder(list[AnyItem])
_body = msgspec.json.Decoder(CompactedBody)


def parse(body: bytes) -> CompactRequest:
    """The request in ``body``. Raises Malformed."""
    call = openai.decoded(_decoder, body)
    if not call.input and call.previous_response_id is None:
        raise Malformed("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    return call


def compacted(body: bytes) -> CompactedBody:
    """The answer in ``body``."""
    return _body.decode(body)


def split(items: Sequence[AnyItem]) -> tuple[list[AnyItem], list[AnyItem]] | None:
    """What of a conversation can be made short, and what its user has just said; None: there is nothing that was not
    made short before."""
    end = len(items)
    while end and _is_users(items[end - 1]):
        end -= 1
    head, tail = list(items[:end]), list(items[end:])
    is_new = any(not _is_users(item) and not isinstance(item, CompactionItem) for item in head)
    return (head, tail) if is_new else None


def whole(secret: bytes, tenant_id: str, items: Sequence[AnyItem]) -> CompactionItem:
    """What stands for ``items``, and for all that is before it."""
    text = sealed(secret, _WHOLE, tenant_id, msgspec.json.encode(items).decode())
    return CompactionItem(encrypted_content=base64.urlsafe_b64encode(text).decode())


def expanded(secret: bytes, tenant_id: str, items: Sequence[AnyItem]) -> list[AnyItem]:
    """What the last of those that stand for all before them stands for, and what is behind it."""
    for number in range(len(items) - 1, -1, -1):
        item = items[number]
        if isinstance(item, CompactionItem) and (found := _inside(secret, tenant_id, item)) is not None:
            return [*found, *items[number + 1 :]]
    return list(items)


def check(secret: bytes, tenant_id: str, item: CompactionItem, path: str) -> None:
    """Raises Malformed where it is none that this install has sealed for the tenant."""
    if _inside(secret, tenant_id, item) is None:
        opened(secret, tenant_id, item, path)


def _inside(secret: bytes, tenant_id: str, item: CompactionItem) -> list[AnyItem] | None:
    try:
        text = unsealed(secret, _WHOLE, tenant_id, base64.urlsafe_b64decode(item.encrypted_content))
    except ValueError:
        return None
    return _items.decode(text)


def _is_users(item: AnyItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def opened(secret: bytes, tenant_id: str, item: CompactionItem, path: str) -> MessageItem:
    """What a model reads of it. Raises Malformed where it is none that this install has sealed for the tenant."""
    try:
        text = unsealed(secret, _WHAT, tenant_id, base64.urlsafe_b64decode(item.encrypted_content))
    except ValueError:
        raise Malformed(
            f"Invalid '{path}': it cannot be verified, as it was not made here for this project",
            path,
            "invalid_encrypted_content",
        ) from None
    return said_by_user(READING + text)


def all_opened(secret: bytes, tenant_id: str, items: Sequence[AnyItem]) -> list[AnyItem]:
    """``items`` as a model reads them. Raises Malformed."""
    return [
        opened(secret, tenant_id, item, "input") if isinstance(item, CompactionItem) else item
        for item in expanded(secret, tenant_id, items)
    ]
