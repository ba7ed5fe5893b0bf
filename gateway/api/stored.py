"""/v1/responses/{response_id}: what became of a response, for the tenant that asked for it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from gateway import errors, head
from gateway.api.request import query_of
from gateway.auth import Caller
from gateway.house import GATEWAY, Gateway
from gateway.openai.pages import page_of
from gateway.reply.events import EventStream
from gateway.responses.reading import relay
from gateway.responses.requests import Include
from gateway.responses.shapes import DeletedResponse, ItemList, ItemsQuery
from gateway.responses.shelf import Kept, Shelf, said_in

SCOPE = "responses"
PATH = "/v1/responses/{response_id}"


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    """``starting_after``: the number of the last event that the client has. ``include_obfuscation``: as in
    ``StreamOptions``."""

    include: list[Include] = msgspec.field(name="include[]", default=[])
    """As in a request."""
    stream: bool = False
    include_obfuscation: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=2**63 - 2)] | None = None


async def retrieve(request: web.Request) -> web.StreamResponse:
    gw, _, kept = await _found(request)
    query = query_of(request, RetrieveQuery)
    if query.starting_after is not None and not query.stream:
        raise errors.InvalidRequest("'starting_after' is allowed only when 'stream' is true", param="starting_after")
    if not query.stream or request.method == hdrs.METH_HEAD:
        return head.Whole(kept.body)
    if not kept.is_background:
        raise errors.InvalidRequest("Only a response in the background can be streamed again", param="stream")
    first = 0 if query.starting_after is None else query.starting_after + 1
    outlet = EventStream(request, gw.settings.server, gw.clock)
    running = gw.responses.background.find(kept.tenant_id, kept.id)
    return await relay(outlet, gw, kept, running, first, query.include_obfuscation)


async def delete(request: web.Request) -> web.StreamResponse:
    """One that is still being written is broken off."""
    gw, caller, kept = await _found(request)
    running = gw.responses.background.find(caller.tenant_id, kept.id)
    if running is not None:
        await gw.responses.background.cancel(running)
    if not await gw.responses.shelf.delete(caller.tenant_id, kept.id):
        raise _missing(kept.id)
    return head.Whole.of(DeletedResponse(kept.id))


async def cancel(request: web.Request) -> web.StreamResponse:
    """What has ended stays as it is."""
    gw, caller, kept = await _found(request)
    if not kept.is_background:
        raise errors.InvalidRequest("Cannot cancel a synchronous response: only one in the background can be cancelled")
    running = gw.responses.background.find(caller.tenant_id, kept.id)
    if running is not None:
        return head.Whole.of(await gw.responses.background.cancel(running))
    if kept.is_open:
        await gw.responses.shelf.end_elsewhere(kept, "cancelled")
        kept = await _of(gw.responses.shelf, caller, kept.id)
    return head.Whole(kept.body)


async def input_items(request: web.Request) -> web.StreamResponse:
    """Those of the responses before it come first."""
    gw, caller, kept = await _found(request)
    query = query_of(request, ItemsQuery)
    chain = await gw.responses.shelf.chain(caller.tenant_id, kept.id)
    before, _ = await said_in(chain[:-1]) if chain[1:] else ([], None)
    items = [*before, *kept.items()]
    return head.Whole.of(ItemList.of(*page_of(items, query, "Item")))


def routes() -> list[web.RouteDef]:
    return [
        web.get(PATH, retrieve),
        web.delete(PATH, delete),
        web.post(f"{PATH}/cancel", cancel),
        web.get(f"{PATH}/input_items", input_items),
    ]


async def _found(request: web.Request) -> tuple[Gateway, Caller, Kept]:
    """What the request is about. Raises NotFound; another tenant's is not there."""
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for(SCOPE, request)
    return gw, caller, await _of(gw.responses.shelf, caller, request.match_info["response_id"])


async def _of(shelf: Shelf, caller: Caller, response_id: str) -> Kept:
    kept = await shelf.find(caller.tenant_id, response_id)
    if kept is None:
        raise _missing(response_id)
    return kept


def _missing(response_id: str) -> errors.NotFound:
    return errors.NotFound(f"Response with id '{response_id[:80]}' not found.", code="response_not_found")
