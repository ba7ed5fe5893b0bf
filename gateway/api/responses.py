"""/v1/responses: a chat's journey, with its state kept here; in the background if asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from gateway import errors, head, openai
from gateway.api import items
from gateway.api.answer import give
from gateway.api.chat import prepared, prompt_of
from gateway.api.request import may_store, parsed, taken_body_of
from gateway.api.traced import behind
from gateway.auth import Caller
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.reply.events import OUTLET, EventStream
from gateway.reply.storing import Storing
from gateway.responses import requests
from gateway.responses.answer import ResponseAnswer
from gateway.responses.conversation import Message, messages_of, turns, without_oldest
from gateway.responses.events import Events
from gateway.responses.items import AnyItem, named
from gateway.responses.outlets import Log
from gateway.responses.reading import relay
from gateway.responses.requests import ResponseRequest
from gateway.responses.running import Running
from gateway.responses.shapes import InputTokens, begun
from gateway.responses.shelf import Kept
from gateway.shelving import ShelfAway
from gateway.telemetry import about
from policies.priority import Order

log = logging.getLogger(__name__)

SCOPE = "responses"


async def create(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = await parsed(requests.parse, body)
    caller.check(call.model, SCOPE)
    return await gw.idempotency.once(request, caller, body, lambda: _answered(gw, request, caller, call))


async def count(gw: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/input_tokens: how long the prompt would be."""
    caller = gw.auth.caller_of(request)
    call = await parsed(requests.parse_count, await taken_body_of(gw, request))
    caller.check_endpoint(SCOPE)
    given = await items.given(gw, caller, call.input or [])
    before = await items.before(gw, caller, call)
    chat = requests.counted_chat_of(call, messages_of(call.instructions, before + given))
    caller.check(chat.model, SCOPE)
    prompt = await prompt_of(gw, caller, chat)
    return head.Whole(msgspec.json.encode(InputTokens(len(prompt))))


async def _answered(gw: Gateway, request: web.Request, caller: Caller, call: ResponseRequest) -> web.StreamResponse:
    if call.background and request[HEAD].keeper is not None:
        raise errors.InvalidRequest(
            "A line of a batch has no 'background': it is answered in the batch", param="background"
        )
    stores = call.store is not False and may_store(gw, caller)
    if call.background and not stores:
        raise errors.InvalidRequest(
            "Nothing is stored for this project, so there is no 'background'", param="background"
        )
    response_id = request[HEAD].request_id.replace("req_", "resp_", 1)
    given = named(await items.given(gw, caller, call.input or []), response_id)
    before = await items.before(gw, caller, call)
    messages = messages_of(call.instructions, before + given)
    chat = requests.chat_of(call, messages)
    events = Events(begun(call, response_id, int(time.time()), stores), len(given), call.obfuscates)
    if call.background:
        return await _in_background(gw, request, caller, call, chat, messages, events, given)

    async def store(last: bytes) -> bytes:
        """An answer that cannot be stored is given all the same, as it is paid for; and says so."""
        try:
            await gw.responses.shelf.put(Kept.of(caller.tenant_id, events.body, given))
        except ShelfAway:
            noted = request[HEAD]
            log.warning("response %s is not stored", response_id, extra=about(noted.request_id, noted.trace_id))
            return events.unstored(last)
        return last

    if stores and call.stream:
        outlet = request.get(OUTLET) or EventStream(request, gw.settings.server, gw.clock)
        request[OUTLET] = Storing(outlet, store, store)
    answer, order = await _prepared(gw, request, caller, call, chat, messages, events)
    response = await give(gw, request, caller, answer, order)
    if stores and not call.stream:
        await store(b"")
        if not events.body.store:
            return head.Whole(msgspec.json.encode(events.body))
    return response


async def _in_background(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: ResponseRequest,
    chat: openai.ChatRequest,
    messages: list[Message],
    events: Events,
    given: list[AnyItem],
) -> web.StreamResponse:
    """Answers at once; what can be refused is refused before."""
    background, streams = gw.responses.background, bool(call.stream)
    chat = msgspec.structs.replace(chat, stream=True)
    ready: tuple[ResponseAnswer, Order] | None = None

    async def work(log: Log) -> web.StreamResponse:
        with behind(gw, request):
            answer, order = ready or await _prepared(gw, request, caller, call, chat, messages, events)
            request[OUTLET] = log
            return await give(gw, request, caller, answer, order)

    with background.room(caller.tenant_id):
        if gw.upstreams.of(chat.model) is not None or gw.dispatch.ready(chat.model) is not None:
            ready = await _prepared(gw, request, caller, call, chat, messages, events)
        outlet = request.get(OUTLET) or EventStream(request, gw.settings.server, gw.clock)
        running = Running(caller.tenant_id, events, request[HEAD])
        running.log.add(events.queued())
        queued = events.body
        await gw.responses.shelf.put(Kept.of(caller.tenant_id, queued, given))
        background.start(running, work)
    if not streams:
        return head.Whole(msgspec.json.encode(queued))
    return await relay(outlet, gw, Kept.of(caller.tenant_id, queued, given), running, 0)


async def _prepared(
    gw: Gateway,
    request: web.Request,
    caller: Caller,
    call: ResponseRequest,
    chat: openai.ChatRequest,
    messages: list[Message],
    events: Events,
) -> tuple[ResponseAnswer, Order]:
    """As for a chat. With ``truncation`` the fewest of the oldest turns are left out with which it fits."""
    shaped: Callable[..., ResponseAnswer] = partial(ResponseAnswer, events)

    async def without(num_turns: int) -> tuple[ResponseAnswer, Order]:
        asked = chat if not num_turns else _shortened(call, chat, messages, num_turns)
        try:
            return await prepared(gw, request, caller, asked, shaped)
        except openai.Malformed as error:
            raise requests.said_of_a_chat(error) from None
        except errors.GatewayError as error:
            if error.param == "messages":
                error.param = "input"
            raise

    try:
        return await without(0)
    except errors.ContextLengthExceeded:
        least, most = 1, len(turns(messages)) - 1
        if call.truncation != "auto" or most < least:
            raise
    found = await without(most)
    while least < most:
        middle = (least + most) // 2
        try:
            found = await without(middle)
        except errors.ContextLengthExceeded:
            least = middle + 1
        else:
            most = middle
    return found


def _shortened(
    call: ResponseRequest, chat: openai.ChatRequest, messages: list[Message], num_turns: int
) -> openai.ChatRequest:
    shorter = requests.chat_of(call, without_oldest(messages, num_turns))
    return msgspec.structs.replace(shorter, stream=chat.stream)
