"""/v1/responses: a chat's journey, with its state kept here; in the background if asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway import errors, head, reply
from gateway.api import items
from gateway.api.answer import give
from gateway.api.chat import prompt_of
from gateway.api.compaction import Short, shortened
from gateway.api.early import EARLY, is_out, streamed
from gateway.api.held import strictly
from gateway.api.request import may_store
from gateway.api.traced import behind
from gateway.api.turn import Question, Turn
from gateway.auth import Caller
from gateway.background import to_its_end
from gateway.bodies import parsed, taken_body_of
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.reply.events import OUTLET, EventStream, Outlet
from gateway.reply.storing import Storing
from gateway.responses import requests
from gateway.responses.answer import ResponseAnswer
from gateway.responses.compaction import expanded
from gateway.responses.events import Events
from gateway.responses.items import named, unnamed
from gateway.responses.nearby import NEAR
from gateway.responses.outlets import Log
from gateway.responses.reading import relay
from gateway.responses.requests import ResponseRequest
from gateway.responses.running import Running
from gateway.responses.shapes import OPEN, InputTokens, begun
from policies.priority import Order

SCOPE = "responses"
Answered = Callable[[Short | None], Awaitable[web.StreamResponse]]
"""The rest of the way of what is as long as it was, or was made short."""


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
    chat = requests.counted_chat_of(call, items.messages(gw, caller, call, before + given))
    caller.check(chat.model, SCOPE)
    prompt = await prompt_of(gw, caller, chat)
    return head.Whole.of(InputTokens(len(prompt)))


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
    near = request.get(NEAR)
    remembered = None if near is None else near.nearby.find(call.previous_response_id)
    async with contextlib.AsyncExitStack() as stack:
        if call.conversation_id is not None:
            items.check_kept(gw, caller)
            held = gw.conversations.held(caller.tenant_id, call.conversation_id, response_id)
            await stack.enter_async_context(held)
        given = await items.given(gw, caller, call.input or [])
        given = named(given if call.conversation_id is None else unnamed(given), response_id)
        before = await items.before(gw, caller, call, len(given), remembered)
        said = expanded(gw.directory.secret, caller.tenant_id, before + given)
        call = await strictly(gw, caller.tenant_id, call)
        body = begun(call, response_id, int(time.time()), stores)
        tells = call.include_reasoning is not False
        events = Events(body, len(given), call.obfuscates, nests_errors=near is not None, tells_reasoning=tells)
        # Before a summary is written, and paid for.
        place = stack.enter_context(gw.responses.background.room(caller.tenant_id)) if call.background else None

        async def answered(short: Short | None) -> web.StreamResponse:
            messages = items.messages(gw, caller, call, said if short is None else short.items)
            asked = Question(gw, request, caller, call, requests.chat_of(call, messages), messages)
            if short is not None:
                events.precede(short.stands_for_them, short.usage)
            turn = Turn(asked, given, events, near, remembered)
            return await (_at_once(turn) if place is None else _in_background(turn, place, stack))

        if call.context_management:
            shorter = shortened(gw, request, caller, call, said)
            if not call.stream:
                return await answered(await shorter)
            return await _streamed(gw, request, events, lambda outlet: _summed_up(outlet, shorter, answered))
        if call.stream and place is None and near is None and is_out(gw, call.model):
            return await _streamed(gw, request, events, lambda outlet: _loaded(request, outlet, answered))
        return await answered(None)


def _streamed(
    gw: Gateway, request: web.Request, events: Events, answer: Callable[[Outlet], Awaitable[web.StreamResponse]]
) -> Awaitable[web.StreamResponse]:
    """A stream whose client hears that it is being worked at while it waits for a summary, or for its model."""

    def is_told() -> bool:
        return events.body.status not in OPEN or gw.responses.background.writes(events.body.id)

    outlet = request[OUTLET] = _outlet_of(gw, request)
    return streamed(request, outlet, answer(outlet), events.failed, is_told)


async def _summed_up(
    outlet: Outlet, shorter: Coroutine[Any, Any, Short | None], answered: Answered
) -> web.StreamResponse:
    return await answered(await reply.awaited(outlet, shorter))


async def _loaded(request: web.Request, outlet: Outlet, answered: Answered) -> web.StreamResponse:
    request[EARLY] = outlet
    return await answered(None)


def _outlet_of(gw: Gateway, request: web.Request) -> Outlet:
    return request.get(OUTLET) or EventStream(request, gw.settings.server, gw.clock)


async def _at_once(turn: Turn) -> web.StreamResponse:
    asked, events = turn.asked, turn.events
    gw, request = asked.gw, asked.request
    keeps = events.body.store or events.body.conversation is not None or turn.near is not None
    if keeps and asked.call.stream:
        request[OUTLET] = Storing(_outlet_of(gw, request), turn.end, turn.end)
    answer, order = await asked.prepared(partial(ResponseAnswer, events))
    if turn.near is not None and not turn.near.generates:
        async with request[OUTLET] as outlet:
            return await outlet.end(events.nothing())
    response = await give(gw, request, asked.caller, answer, order)
    if keeps and not asked.call.stream:
        said = events.body
        await turn.end(b"")
        if events.body is not said:
            return head.Whole.of(events.body)
    return response


async def _in_background(
    turn: Turn, place: contextlib.ExitStack, stack: contextlib.AsyncExitStack
) -> web.StreamResponse:
    """Answers at once; what can be refused is refused before. ``place``: its own among those in the background;
    ``stack``: what the response needs until it has ended."""
    asked, events = turn.asked, turn.events
    gw, request, caller = asked.gw, asked.request, asked.caller
    asked = replace(asked, chat=msgspec.structs.replace(asked.chat, stream=True))
    ready: tuple[ResponseAnswer, Order] | None = None

    async def work(needed: contextlib.AsyncExitStack, log: Log) -> web.StreamResponse:
        async with needed:
            with behind(gw, request):
                answer, order = ready or await asked.prepared(partial(ResponseAnswer, events))
                request[OUTLET] = Storing(log, turn.end, turn.end)
                return await give(gw, request, caller, answer, order)

    model = asked.chat.model
    if gw.upstreams.of(model) is not None or gw.dispatch.ready(model) is not None:
        ready = await asked.prepared(partial(ResponseAnswer, events))
    outlet = _outlet_of(gw, request)
    running = Running(caller.tenant_id, events, request[HEAD])
    running.log.add(events.queued())
    queued = turn.kept()

    async def started() -> None:
        await gw.responses.shelf.put(queued)
        gw.responses.background.start(running, place.pop_all(), partial(work, stack.pop_all()))

    await to_its_end(started())  # what is stored is written, too, though its client may be gone by then
    if not asked.call.stream:
        return head.Whole(queued.body)
    return await relay(outlet, gw, queued, running, 0)
