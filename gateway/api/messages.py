"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's conversations, on the way that chats go."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import partial

from aiohttp import web
from multidict import istr

from gateway import anthropic, head, openai
from gateway.api import chat
from gateway.api.answer import give
from gateway.api.early import patient
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.errors import InvalidRequest
from gateway.head import HEAD
from gateway.house import Gateway

VERSION = istr("anthropic-version")
ORGANIZATION = "anthropic-organization-id"


async def create(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = _begin(gw, request)
    body = await taken_body_of(gw, request)
    call = await parsed(anthropic.parse_message, body)
    caller.check(call.model, "chat.completions")
    return await gw.idempotency.once(request, caller, body, lambda: _patiently(gw, request, caller, call))


async def count(gw: Gateway, request: web.Request) -> web.StreamResponse:
    """How long the prompt would be; nothing is computed and nothing is owed."""
    caller = _begin(gw, request)
    call = await parsed(anthropic.parse_count, await taken_body_of(gw, request))
    caller.check(call.model, "chat.completions")
    prompt = await chat.prompt_of(gw, caller, call)
    return head.Whole.of(anthropic.TokenCount(len(prompt)))


def _patiently(
    gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest
) -> Awaitable[web.StreamResponse]:
    failed = partial(anthropic.event, request_id=request[HEAD].request_id)
    return patient(gw, request, call, _answered(gw, request, caller, call), failed)


async def _answered(gw: Gateway, request: web.Request, caller: Caller, call: openai.ChatRequest) -> web.StreamResponse:
    answer, order = await chat.prepared(gw, request, caller, call, anthropic.MessageAnswer)
    return await give(gw, request, caller, answer, order)


def _begin(gw: Gateway, request: web.Request) -> Caller:
    head.also(request, {"request-id": request[HEAD].request_id})
    caller = gw.auth.caller_of(request)
    head.also(request, {ORGANIZATION: caller.organization_id})
    version = request.headers.get(VERSION)
    if version is not None and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", version):
        raise InvalidRequest("anthropic-version: it is a date, such as 2023-06-01", param="anthropic-version")
    return caller
