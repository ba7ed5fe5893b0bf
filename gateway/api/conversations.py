"""/v1/conversations: what is said in one, kept for the tenant whose it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway import head
from gateway.api import items
from gateway.api.request import query_of
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.conversations.shapes import Addition, Change, Creation, DeletedConversation, Including
from gateway.conversations.shelf import Kept, missing
from gateway.head import HEAD
from gateway.house import GATEWAY, Gateway
from gateway.openai.decoding import decoded
from gateway.openai.messages import WRITTEN, check_text
from gateway.responses.items import AnyItem, MessageItem, named, unnamed
from gateway.responses.shapes import ItemList, ItemsQuery

SCOPE = "responses"
ROOT = "/v1/conversations"
PATH = "/v1/conversations/{conversation_id}"
ITEMS = f"{PATH}/items"
ITEM = f"{ITEMS}/{{item_id}}"
_creation, _change = msgspec.json.Decoder(Creation), msgspec.json.Decoder(Change)
_addition = msgspec.json.Decoder(Addition)


async def create(request: web.Request) -> web.StreamResponse:
    gw, caller = _asked(request)
    items.check_kept(gw, caller)
    body = await taken_body_of(gw, request)
    asked = await parsed(partial(decoded, _creation), body)

    async def created() -> web.StreamResponse:
        conversation_id = request[HEAD].request_id.replace("req_", "conv_", 1)
        new = await _new(gw, caller, request, asked.items or [])
        kept = await gw.conversations.create(caller.tenant_id, conversation_id, asked.metadata or {}, new)
        return head.Whole.of(kept.shown())

    return await gw.idempotency.once(request, caller, body, created)


async def one(request: web.Request) -> web.StreamResponse:
    _, _, kept = await _found(request)
    return head.Whole.of(kept.shown())


async def change(request: web.Request) -> web.StreamResponse:
    gw, _, kept = await _found(request)
    asked = decoded(_change, await taken_body_of(gw, request))
    return head.Whole.of((await gw.conversations.label(kept, asked.metadata or {})).shown())


async def delete(request: web.Request) -> web.StreamResponse:
    """Its items go with it. A response that is being written in it is given all the same."""
    gw, _, kept = await _found(request)
    if not await gw.conversations.delete(kept.tenant_id, kept.id):
        raise missing(kept.id)
    return head.Whole.of(DeletedConversation(id=kept.id))


async def add(request: web.Request) -> web.StreamResponse:
    query_of(request, Including)
    gw, caller, kept = await _found(request)
    items.check_kept(gw, caller)
    body = await taken_body_of(gw, request)
    asked = await parsed(partial(decoded, _addition), body)

    async def added() -> web.StreamResponse:
        new = await _new(gw, caller, request, asked.items)
        await gw.conversations.add(kept.tenant_id, kept.id, new)
        return head.Whole.of(ItemList.of(new, False))

    return await gw.idempotency.once(request, caller, body, added)


async def page(request: web.Request) -> web.StreamResponse:
    gw, _, kept = await _found(request)
    return head.Whole.of(ItemList.of(*await gw.conversations.page(kept, query_of(request, ItemsQuery))))


async def item(request: web.Request) -> web.StreamResponse:
    query_of(request, Including)
    gw, _, kept = await _found(request)
    return head.Whole.of(await gw.conversations.item(kept, request.match_info["item_id"]))


async def remove(request: web.Request) -> web.StreamResponse:
    gw, _, kept = await _found(request)
    await gw.conversations.remove(kept, request.match_info["item_id"])
    return head.Whole.of(kept.shown())


def routes() -> list[web.RouteDef]:
    return [
        web.post(ROOT, create),
        web.get(PATH, one),
        web.post(PATH, change),
        web.delete(PATH, delete),
        web.post(ITEMS, add),
        web.get(ITEMS, page),
        web.get(ITEM, item),
        web.delete(ITEM, remove),
    ]


async def _new(gw: Gateway, caller: Caller, request: web.Request, said: list[dict[str, Any]]) -> list[AnyItem]:
    """Items that are to be added. Their ids are made here, so that none is there twice. Raises Malformed."""
    new = await items.given(gw, caller, said, "items")
    for number, each in enumerate(new):
        if isinstance(each, MessageItem) and each.role in WRITTEN:
            check_text(each.text, f"items[{number}].content")
    return named(unnamed(new), request[HEAD].request_id)


def _asked(request: web.Request) -> tuple[Gateway, Caller]:
    gw = request.app[GATEWAY]
    return gw, gw.auth.caller_for(SCOPE, request)


async def _found(request: web.Request) -> tuple[Gateway, Caller, Kept]:
    """What the request is about. Raises NotFound."""
    gw, caller = _asked(request)
    return gw, caller, await gw.conversations.find(caller.tenant_id, request.match_info["conversation_id"])
