"""/v1/chat/completions of those that were kept, for the tenant that asked for them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from gateway import errors, head, openai
from gateway.api.request import query_of
from gateway.auth import Caller
from gateway.bodies import taken_body_of
from gateway.chats.shapes import (
    ChatChange,
    ChatMessageQuery,
    ChatQuery,
    DeletedChat,
    KeptMessage,
    KeptMessages,
    KeptPage,
)
from gateway.chats.shelf import Kept, is_id
from gateway.house import GATEWAY, Gateway
from gateway.openai.decoding import decoded
from gateway.openai.pages import ends_of, page_of

SCOPE = "chat.completions"
ROOT = "/v1/chat/completions"
PATH = "/v1/chat/completions/{completion_id}"
_change = msgspec.json.Decoder(ChatChange)
_PAIR = re.compile(r"(?s)metadata\[(.*)\]")


async def every(request: web.Request) -> web.StreamResponse:
    gw, caller = _asked(request)
    query = _query(request)
    if query.after is not None and not is_id(query.after):
        raise errors.InvalidRequest(f"Chat completion with id '{query.after[:80]}' not found.", param="after")
    page, has_more = await gw.chats.page(caller.tenant_id, query)
    first_id, last_id = ends_of(page)
    data = [Raw(kept.shown()) for kept in page]
    return head.Whole.of(KeptPage(data=data, first_id=first_id, last_id=last_id, has_more=has_more))


async def one(request: web.Request) -> web.StreamResponse:
    _, kept = await _found(request)
    return head.Whole(kept.shown())


async def messages(request: web.Request) -> web.StreamResponse:
    _, kept = await _found(request)
    query = query_of(request, ChatMessageQuery)
    given = [KeptMessage.of(message, kept.id, number) for number, message in enumerate(kept.asked())]
    page, has_more = page_of(given, query, "Message")
    first_id, last_id = ends_of(page)
    return head.Whole.of(KeptMessages(data=page, first_id=first_id, last_id=last_id, has_more=has_more))


async def change(request: web.Request) -> web.StreamResponse:
    gw, kept = await _found(request)
    changed = decoded(_change, await taken_body_of(gw, request))
    labelled = await gw.chats.label(kept, changed.metadata)
    if labelled is None:
        raise _missing(kept.id)
    return head.Whole(labelled.shown())


async def delete(request: web.Request) -> web.StreamResponse:
    gw, kept = await _found(request)
    if not await gw.chats.delete(kept.tenant_id, kept.id):
        raise _missing(kept.id)
    return head.Whole.of(DeletedChat(id=kept.id))


def routes() -> list[web.RouteDef]:
    return [
        web.get(ROOT, every),
        web.get(PATH, one),
        web.post(PATH, change),
        web.delete(PATH, delete),
        web.get(f"{PATH}/messages", messages),
    ]


def _query(request: web.Request) -> ChatQuery:
    """Raises Malformed."""
    fields: dict[str, Any] = {}
    pairs: dict[str, str] = {}
    for name, value in request.query.items():
        if (pair := _PAIR.fullmatch(name)) is not None:
            pairs[pair[1]] = value
        else:
            fields[name] = value
    if pairs:
        fields["metadata"] = pairs
    return openai.converted(fields, ChatQuery, "", strict=False)


def _asked(request: web.Request) -> tuple[Gateway, Caller]:
    gw = request.app[GATEWAY]
    return gw, gw.auth.caller_for(SCOPE, request)


async def _found(request: web.Request) -> tuple[Gateway, Kept]:
    """What the request is about. Raises NotFound; another tenant's is not there."""
    gw, caller = _asked(request)
    chat_id = request.match_info["completion_id"]
    kept = await gw.chats.find(caller.tenant_id, chat_id)
    if kept is None:
        raise _missing(chat_id)
    return gw, kept


def _missing(chat_id: str) -> errors.NotFound:
    return errors.NotFound(f"Chat completion with id '{chat_id[:80]}' not found.", code="chat_completion_not_found")
