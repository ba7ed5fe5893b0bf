"""POST /v1/responses/compact: a response's journey, to a summary of what was said."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from gateway.api import items
from gateway.api.answer import give
from gateway.api.request import parsed, taken_body_of
from gateway.api.turn import Question
from gateway.auth import Caller
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.responses import compaction, requests
from gateway.responses.items import MessageItem, named, said_by_user

SCOPE = "responses"


async def compact(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = (await parsed(compaction.parse, body)).response()
    caller.check(call.model, SCOPE)
    return await gw.idempotency.once(request, caller, body, lambda: _compacted(gw, request, caller, call))


async def _compacted(
    gw: Gateway, request: web.Request, caller: Caller, call: requests.ResponseRequest
) -> web.StreamResponse:
    given = named(await items.given(gw, caller, call.input or []), request[HEAD].request_id)
    said = [*await items.before(gw, caller, call), *given]
    messages = items.messages(gw, caller, call, [*said, said_by_user(compaction.ASKING)])
    question = Question(gw, request, caller, call, requests.chat_of(call, messages), messages)
    users = [item for item in said if isinstance(item, MessageItem) and item.role == "user"]
    shaped = partial(compaction.CompactedAnswer, gw.directory.secret, caller.tenant_id, users)
    answer, order = await question.prepared(shaped)
    return await give(gw, request, caller, answer, order)
